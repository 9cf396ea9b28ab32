"""Text generation: a key-value cache, many samples in one batch, and text that is streamed."""

from gpt.generation.api import generate, stream, stream_samples
from gpt.generation.decoding import for_decoding
from gpt.generation.engine import Engine
from gpt.generation.sampling import Sampling
from gpt.generation.text import TextStream
from gpt.generation.texts import Request, Sample, Token, window_start

__all__ = ["Engine", "Request", "Sample", "Sampling", "TextStream", "Token", "for_decoding", "generate"]
__all__ += ["stream", "stream_samples", "window_start"]
