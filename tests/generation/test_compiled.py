"""The compiled program beside the model that it stands for: equal bits whatever is read beside a text."""

import platform
import shutil

import pytest
import torch

from gpt import GPT, GPTConfig
from gpt.generation import Engine, Request, Sampling, build, for_decoding
from gpt.generation.cache import Cache, Read
from gpt.generation.compiled import Compiled
from gpt.generation.decoding import backend_of
from gpt.weights.rounding import in_precision
from tests.generation.conftest import CONFIG, PROMPTS, sharp

PRECISIONS = ["float32", "bfloat16", "int8", "int4"]


def for_processor(name: str, compiler: str):
    """A slow case: the program as it is compiled for an x86 processor that can do less."""
    is_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86")
    return pytest.param(compiler, marks=[pytest.mark.slow, is_x86], id=name)


COMPILERS = [
    pytest.param("c++", id="here"),
    for_processor("AMD", "c++ -D__znver4__"),  # bfloat16's instruction is used only on AMD's processors
    for_processor("Intel", "c++ -U__znver3__ -U__znver4__ -U__znver5__"),
    for_processor("AVX2", "c++ -mno-avx512f"),
    for_processor("no AVX", "c++ -mno-avx"),
]


@pytest.fixture(scope="module", params=COMPILERS, autouse=True)
def program(tmp_path_factory, request):
    """The compiled program, in a cache of its own."""
    if shutil.which("c++") is None:
        pytest.skip("there is no compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CACHE", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("CXX", request.param)
        yield build.build()


def ready(config: GPTConfig = CONFIG, precision: str | None = None, std: float = 0.3) -> GPT:
    model = for_decoding(sharp(config, std=std), precision)
    assert isinstance(backend_of(model), Compiled)
    return model


def write(model: GPT, prompts: list[list[int]], count: int, **options) -> list[tuple[list[int], list[tuple]]]:
    """The likeliest tokens after each prompt, and their scores."""
    engine = Engine(model, **options)
    how = {"max_new_tokens": count, "sampling": Sampling(temperature=0), "alternatives": 2}
    texts = {engine.add(Request(tokens=prompt, **how))[0]: [] for prompt in prompts}
    for token in engine.run():
        texts[token.sample].append((token.id, *token.logprobs))
    return [(sample.tokens, scores) for sample, scores in texts.items()]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_was_read_before_counts_bit_for_bit(precision):
    """Texts written with the cache, and each of their tokens by reading the whole text before it."""
    fast = ready(precision=precision)
    for tokens, scores in write(fast, PROMPTS, 30, chunk=16):
        for new, score in enumerate(scores):
            end = len(tokens) - 30 + new
            assert write(fast, [tokens[:end]], 1) == [(tokens[: end + 1], [score])]


@pytest.fixture
def threads():
    """Sets the number of threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


WIDE = GPTConfig(vocab_size=301, context_length=256, emb_dim=128, num_heads=2, num_layers=2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["narrow heads", "GPT-2's width of a head"])
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(config, precision, threads):
    """Rows that join late, leave early and slide."""
    fast = ready(config, precision)
    together = write(fast, PROMPTS, 24, max_samples=3, chunk=16)
    for count in (1, 2):
        threads(count)
        assert [write(fast, [prompt], 24, chunk=16)[0] for prompt in PROMPTS] == together


SHAPES = {
    "biases": {"emb_dim": 128, "num_heads": 2},
    "exact GELU": {"emb_dim": 128, "num_heads": 2, "qkv_bias": False, "exact_gelu": True},
    "several chunks of inputs": {"emb_dim": 288, "num_heads": 18},
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_logits_are_the_models(shape, precision):
    """In a vocabulary that is no multiple of a vector."""
    config = GPTConfig(vocab_size=307, context_length=99, num_layers=2, **shape)
    fast = ready(config, precision, std=0.1)
    ((tokens, scores),) = write(fast, [[4, 5, 6] * 20], 30)
    reference = in_precision(fast, precision)
    expected = reference(torch.tensor([tokens]))[0].float().log_softmax(-1)[range(59, 89), tokens[60:]]
    log_probabilities = torch.tensor([log_probability for _, log_probability, _ in scores])
    limit = 1e-4 if precision == "float32" else 0.2
    torch.testing.assert_close(log_probabilities, expected, atol=limit, rtol=0)


def test_ids_reach_the_program_as_whole_numbers():
    model = ready()
    assert write(model, [[4, 5]], 3)[0][1] == write(model, [[4.0, 5.0]], 3)[0][1]


def test_an_allocation_that_fails_is_told(monkeypatch):
    """By the program, for a width for which no machine has memory, and then by what calls it."""
    backend = backend_of(ready())
    call = backend._call(1)
    call.D = 1 << 48
    monkeypatch.setattr(backend, "_call", lambda tokens: call)
    cache = Cache(CONFIG, backend.like)
    cache.reserve(1, 1)
    with pytest.raises(MemoryError, match="no memory to read 1 tokens"):
        backend.read([Read(0, [40])], cache)
