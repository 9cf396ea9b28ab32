"""A minimal GPT: train it, generate text with it, reuse its attention module. Names load on first use."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpt.attention import MultiHeadAttention
    from gpt.config import GPTConfig
    from gpt.generation import generate
    from gpt.text.tokenizer import Tokenizer
    from gpt.weights.load import PretrainedGPT as GPT

__all__ = ["GPT", "GPTConfig", "MultiHeadAttention", "Tokenizer", "generate"]

_HOME = {
    "GPT": "gpt.weights.load:PretrainedGPT",
    "GPTConfig": "gpt.config:GPTConfig",
    "MultiHeadAttention": "gpt.attention:MultiHeadAttention",
    "Tokenizer": "gpt.text.tokenizer:Tokenizer",
    "generate": "gpt.generation:generate",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'gpt' has no attribute {name!r}")
    return resolve_name(_HOME[name])
