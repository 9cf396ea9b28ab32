"""A minimal GPT: train it, generate text with it, reuse its attention module.

The names load on first use, so that `import gpt` and `gpt --help` cost next to nothing and
`from gpt.attention import MultiHeadAttention` imports torch alone.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt.attention import MultiHeadAttention
    from gpt.config import GPTConfig
    from gpt.generate import generate
    from gpt.model import GPT
    from gpt.tokenizer import Tokenizer

__all__ = ["GPT", "GPTConfig", "MultiHeadAttention", "Tokenizer", "generate"]

_HOME = {
    "GPT": "gpt.model",
    "GPTConfig": "gpt.config",
    "MultiHeadAttention": "gpt.attention",
    "Tokenizer": "gpt.tokenizer",
    "generate": "gpt.generate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gpt' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps `gpt.generate` the function: importing the submodule of that name would put the module there."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOME or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
