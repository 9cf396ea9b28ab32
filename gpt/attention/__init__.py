"""Attention: the module inside the GPT, and the systems of the chapters that lead to it. Needs torch alone."""

from gpt.attention.multi_head import MultiHeadAttention

__all__ = ["MultiHeadAttention"]
