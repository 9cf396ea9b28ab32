"""Writing text with a GPT: tokens one by one from a cache, many samples in one batch, text as it comes."""

from gpt.generation.api import Completion, complete, generate, stream, stream_samples
from gpt.generation.command import write
from gpt.generation.engine import Engine, Request, Sample, Token, window_start
from gpt.generation.packed import for_decoding
from gpt.generation.sampling import Sampling
from gpt.generation.text import TextStream

__all__ = [
    "Completion",
    "Engine",
    "Request",
    "Sample",
    "Sampling",
    "TextStream",
    "Token",
    "complete",
    "for_decoding",
    "generate",
    "stream",
    "stream_samples",
    "window_start",
    "write",
]
