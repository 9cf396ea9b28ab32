"""Writing text with a GPT: tokens one by one from a cache, many samples in one batch, text as it comes."""

from gpt.generate.api import Completion, complete, generate, stream, stream_samples
from gpt.generate.command import write
from gpt.generate.engine import Engine, Request, Sample, Token, window_start
from gpt.generate.sampling import Sampling
from gpt.generate.text import TextStream
from gpt.generate.weights import for_decoding

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
