"""Text generation: a key-value cache, many samples in one batch, and text that is streamed."""

from gpt.generation.api import complete as complete
from gpt.generation.api import generate as generate
from gpt.generation.api import stream as stream
from gpt.generation.api import stream_samples as stream_samples
from gpt.generation.decoding import for_decoding as for_decoding
from gpt.generation.engine import Engine as Engine
from gpt.generation.engine import Request as Request
from gpt.generation.engine import Sample as Sample
from gpt.generation.engine import Token as Token
from gpt.generation.prefill import window_start as window_start
from gpt.generation.sampling import Sampling as Sampling
from gpt.generation.text import TextStream as TextStream
