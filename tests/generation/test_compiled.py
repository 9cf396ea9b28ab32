"""The compiled program beside the model that it stands for: equal bits whatever is read beside a text."""

import platform
import shutil

import pytest
import torch

from gpt import GPT, GPTConfig
from gpt.generation import Engine, Request, Sampling, build, for_decoding
from gpt.generation.compiled import Compiled, _Token, quantized
from gpt.generation.decoding import backend_for, backend_of
from tests.generation.conftest import sharp, slow_greedy

PRECISIONS = ["float32", "bfloat16", "int8"]
PROMPTS = [[5, 6, 7], [250] * 40, [9], list(range(100)), [1, 2, 3, 4] * 5, [77, 3] * 31]
CONFIG = GPTConfig(vocab_size=301, context_length=64, emb_dim=64, num_heads=4, num_layers=2)
GREEDY = Sampling(temperature=0)

COMPILERS = {  # bfloat16's instruction is used only on AMD's processors
    "here": "c++",
    "AMD": "c++ -D__znver4__",
    "Intel": "c++ -U__znver3__ -U__znver4__ -U__znver5__",
    "AVX2": "c++ -mno-avx512f",
}


SLOW = [
    pytest.param(
        name, marks=[pytest.mark.slow, pytest.mark.skipif(platform.machine() != "x86_64", reason="x86")]
    )
    for name in ("AMD", "Intel", "AVX2")
]


@pytest.fixture(scope="module", params=["here", *SLOW], autouse=True)
def program(tmp_path_factory, request):
    """The program, also as it is compiled for processors that can do less."""
    if shutil.which("c++") is None:
        pytest.skip("there is no compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CACHE", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("CXX", COMPILERS[request.param])
        yield build.build()


def ready(config: GPTConfig = CONFIG, precision: str | None = None, seed: int = 0, std: float = 0.3) -> GPT:
    model = for_decoding(sharp(config, seed, std), precision)
    assert isinstance(backend_of(model, backend_for(precision)), Compiled)
    return model


def write(
    model: GPT, prompts: list[list[int]], count: int, precision: str | None = None, **options
) -> list[tuple]:
    """The ids of each text with their log-probabilities."""
    engine = Engine(model, backend=backend_for(precision), **options)
    how = {"max_new_tokens": count, "sampling": GREEDY, "alternatives": 2}
    samples = [engine.add(Request(tokens=prompt, **how))[0] for prompt in prompts]
    texts = {id(sample): [] for sample in samples}
    for token in engine.run():
        texts[id(token.sample)].append((token.id, token.log_probability, token.alternatives))
    return [(sample.tokens, texts[id(sample)]) for sample in samples]


@pytest.mark.parametrize("exact", [False, True], ids=["tanh", "exact GELU"])
def test_greedy_with_the_cache_is_greedy_without(exact):
    """The model in float32, past the context of 64 tokens."""
    model = ready(GPTConfig(**{**vars(CONFIG), "exact_gelu": exact}))
    texts = [tokens for tokens, _ in write(model, PROMPTS, 90)]
    assert texts == [slow_greedy(model, prompt, 90) for prompt in PROMPTS]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_was_read_before_counts_bit_for_bit(precision):
    """Texts written with the cache, and each of their tokens by reading the whole text before it."""
    fast = ready(precision=precision)
    for tokens, scored in write(fast, PROMPTS, 30, precision, chunk=16):
        first = len(tokens) - 30
        for i in range(first, len(tokens)):
            assert write(fast, [tokens[:i]], 1, precision) == [
                (tokens[: i + 1], scored[i - first : i - first + 1])
            ]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(precision):
    """Rows that join late, leave early and slide; at GPT-2's width of a head too."""
    for config in (
        CONFIG,
        GPTConfig(vocab_size=301, context_length=256, emb_dim=128, num_heads=2, num_layers=2),
    ):
        fast, threads = ready(config, precision), torch.get_num_threads()
        together = write(fast, PROMPTS, 24, precision, max_samples=3, chunk=16)
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                assert [write(fast, [prompt], 24, precision, chunk=16)[0] for prompt in PROMPTS] == together
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_logits_are_the_models(precision):
    """At GPT-2's width of a head, a vocabulary that is no multiple of a vector, with and without biases.

    The widest is multiplied in several chunks of inputs.
    """
    for bias, width, heads in ((True, 128, 2), (False, 128, 2), (True, 288, 18)):
        config = GPTConfig(
            vocab_size=307,
            context_length=99,
            emb_dim=width,
            num_heads=heads,
            num_layers=2,
            qkv_bias=bias,
            exact_gelu=bias,
        )
        fast = ready(config, precision, std=0.1)
        (tokens, scored), *_ = write(fast, [[4, 5, 6] * 20], 30, precision)
        expected = fast(torch.tensor([tokens]))[0].float().log_softmax(-1)
        given = torch.tensor([log_probability for _, log_probability, _ in scored])
        wanted = expected[59:-1].gather(-1, torch.tensor(tokens[60:])[:, None])[:, 0]
        torch.testing.assert_close(given, wanted, atol=1e-4 if precision == "float32" else 0.2, rtol=0)


def test_ids_reach_the_program_as_whole_numbers():
    model = ready()
    assert write(model, [[4, 5]], 3)[0][1] == write(model, [[4.0, 5.0]], 3)[0][1]


def test_no_memory_ends_one_text_and_not_the_others():
    engine = Engine(ready())
    (failing,) = engine.add(Request(tokens=[40] * 3, max_new_tokens=4, sampling=GREEDY))
    (whole,) = engine.add(Request(tokens=[2], max_new_tokens=4, sampling=GREEDY))
    backend = backend_of(engine.model)
    step = backend._step

    def refuse(model, shape, tokens, logits):
        return 1 if tokens[0].id == 40 else step(model, shape, tokens, logits)

    backend._step = refuse
    engine.step()
    assert isinstance(engine.failed[failing], MemoryError)
    list(engine.run())
    assert (failing.finished, whole.finished) == ("error", "length")


def test_an_allocation_that_fails_is_told():
    """A width for which no machine has memory."""
    backend = backend_of(ready())
    shape = backend._shape(1)
    shape.D = 1 << 48
    assert backend._step(backend._model, shape, (_Token * 1)(), torch.zeros(301).data_ptr()) == 1


def test_int8_weights_are_within_half_a_step():
    """Also of rows of zeros, and of weights that are stored transposed, as transformers' are."""
    weight = torch.randn(64, 48).T
    weight[1] = 0
    steps, scale = quantized(weight)
    assert (steps.float() * scale[:, None] - weight).abs().le(scale[:, None] / 2 * 1.001).all()
    assert steps.dtype == torch.int8 and steps.abs().amax() == 127 and steps.is_contiguous()
