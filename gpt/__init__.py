"""A minimal GPT: train it, generate text with it, reuse its attention module. Names load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt.attention import MultiHeadAttention
    from gpt.config import GPTConfig
    from gpt.generation import generate
    from gpt.text.tokenizer import Tokenizer
    from gpt.weights.load import GPT

__all__ = ["GPT", "GPTConfig", "MultiHeadAttention", "Tokenizer", "generate"]

_HOME = {
    "GPT": "gpt.weights.load",
    "GPTConfig": "gpt.config",
    "MultiHeadAttention": "gpt.attention",
    "Tokenizer": "gpt.text.tokenizer",
    "generate": "gpt.generation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpt' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
