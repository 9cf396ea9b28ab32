"""The attention module inside the GPT, and the systems of the chapters that lead to it. Needs torch alone."""

from gpt.attention.cache import KeyValueCache
from gpt.attention.multi_head import MultiHeadAttention

__all__ = ["KeyValueCache", "MultiHeadAttention"]
