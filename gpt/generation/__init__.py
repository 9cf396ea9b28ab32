"""Text generation with a key-value cache, many samples in one batch, and streaming."""

from gpt.generation.api import generate, stream_samples
from gpt.generation.decoding import for_decoding
from gpt.generation.engine import Engine
from gpt.generation.samples import Request, Sample, Token
from gpt.generation.sampling import Sampling

__all__ = ["Engine", "Request", "Sample", "Sampling", "Token", "for_decoding", "generate", "stream_samples"]
