"""The compiled decoding step beside the model that it stands for."""

import os
import platform
import shutil

import pytest
import torch
from torch import nn

from gpt import GPT, GPTConfig
from gpt.generation import Engine, Request, Sampling, compiled, for_decoding
from gpt.generation.cache import Read
from gpt.generation.compiled import CompiledStep
from tests.generation.conftest import sharp, slow_greedy

PRECISIONS = ["float32", "bfloat16", "int8"]
PROMPTS = [[5, 6, 7], [250] * 40, [9], list(range(100)), [1, 2, 3, 4] * 5, [77, 3] * 31]
CONFIG = GPTConfig(vocab_size=301, context_length=64, emb_dim=64, num_heads=4, num_layers=2)


OPTIONS = {  # bfloat16's instruction is used on AMD's processors alone
    "AMD": ("-D__znver4__",),
    "Intel": ("-U__znver3__", "-U__znver4__", "-U__znver5__"),
    "AVX2": ("-mno-avx512f",),
}


@pytest.fixture(scope="module", params=OPTIONS)
def folder(tmp_path_factory, request):
    """A cache folder that holds the program, also as it is compiled for processors that can do less."""
    if shutil.which("g++") is None:
        pytest.skip("there is no compiler")
    with pytest.MonkeyPatch.context() as patch:
        if platform.machine() == "x86_64":
            patch.setattr(compiled, "_OPTIONS", (*compiled._OPTIONS, *OPTIONS[request.param]))
        compiled._name.cache_clear()
        cache = tmp_path_factory.mktemp("compiled")
        compiled.compile_step(cache / "compiled" / compiled._name())
        yield cache
    compiled._name.cache_clear()


@pytest.fixture
def program(folder, monkeypatch):
    monkeypatch.setenv("GPT_CACHE", str(folder))


@pytest.fixture
def no_program(monkeypatch, tmp_path):
    monkeypatch.setenv("GPT_CACHE", str(tmp_path))


def write(model: GPT, prompts: list[list[int]], count: int, **options) -> list[tuple]:
    """The ids of each text with their log-probabilities."""
    engine = Engine(model, **options)
    how = {"max_new_tokens": count, "sampling": Sampling(temperature=0), "alternatives": 2}
    samples = [engine.add(Request(tokens=prompt, **how))[0] for prompt in prompts]
    texts = {id(sample): [] for sample in samples}
    while engine.busy:
        for token in engine.step():
            texts[id(token.sample)].append((token.id, token.log_probability, token.alternatives))
        assert not engine.running or engine._program
        assert not engine.failed
    return [(sample.tokens, texts[id(sample)]) for sample in samples]


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("exact", [False, True], ids=["tanh", "exact GELU"])
def test_greedy_with_the_cache_is_greedy_without(exact):
    """The model in float32, past the context of 64 tokens."""
    model = sharp(GPTConfig(**{**vars(CONFIG), "exact_gelu": exact}))
    texts = [tokens for tokens, _ in write(for_decoding(model), PROMPTS, 90)]
    assert texts == [slow_greedy(model, prompt, 90) for prompt in PROMPTS]


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_was_read_before_counts_bit_for_bit(precision):
    """Texts written with the cache, and each of their tokens by reading the whole text before it anew."""
    for seed in range(4):
        fast = for_decoding(sharp(CONFIG, seed), precision)
        for tokens, scored in write(fast, PROMPTS, 30, chunk=16):
            first = len(tokens) - 30
            for i in range(first, len(tokens)):
                assert write(fast, [tokens[:i]], 1) == [(tokens[: i + 1], scored[i - first : i - first + 1])]


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_scores_of_a_prompt_are_those_it_was_written_with(precision):
    fast = for_decoding(sharp(CONFIG), precision)
    ((tokens, scored),) = write(fast, [[4, 5, 6]], 50)
    engine = Engine(fast, chunk=16)
    engine.add(Request(tokens=tokens, max_new_tokens=0, echo=True, alternatives=2))
    echoed = [token for _ in range(4) for token in engine.step()]
    assert [(token.id, token.log_probability, token.alternatives) for token in echoed[3:]] == scored


@pytest.mark.usefixtures("program")
def test_waiting_prompts_are_read_at_once(monkeypatch):
    read, engine = [], Engine(for_decoding(sharp(CONFIG)), chunk=64)
    compute = CompiledStep.__call__
    monkeypatch.setattr(
        CompiledStep, "__call__", lambda step, reads: read.append(reads) or compute(step, reads)
    )
    for prompt in PROMPTS:
        engine.add(Request(tokens=prompt, max_new_tokens=2))
    while engine.busy:
        engine.step()
    prompts = [[len(one.tokens) for one in reads if len(one.tokens) > 1 or not one.held] for reads in read]
    assert [lengths for lengths in prompts if lengths] == [[3, 40, 1, 36], [20, 62]]


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_depends_neither_on_the_others_nor_on_the_threads(precision):
    fast = for_decoding(sharp(CONFIG), precision)
    together, threads = write(fast, PROMPTS, 40, max_samples=5, chunk=16), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert [write(fast, [prompt], 40, chunk=16)[0] for prompt in PROMPTS] == together
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("program")
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
        fast = for_decoding(sharp(config), precision)
        (tokens, scored), *_ = write(fast, [[4, 5, 6] * 20], 30)
        expected = fast(torch.tensor([tokens]))[0].log_softmax(-1)
        given = torch.tensor([log_probability for _, log_probability, _ in scored])
        wanted = expected[59:-1].gather(-1, torch.tensor(tokens[60:])[:, None])[:, 0]
        torch.testing.assert_close(given, wanted, atol=1e-4 if precision == "float32" else 0.2, rtol=0)


@pytest.mark.usefixtures("program")
def test_ids_reach_the_program_as_whole_numbers():
    """With one of another type beside them it would take the bytes of numbers for addresses."""
    step, cache = CompiledStep.of(for_decoding(sharp(CONFIG))), torch.zeros(2, 2, 4, 2, 16)
    whole, floats = (step([Read(tokens, 0, cache, 2)]) for tokens in ([4, 5], [4.0, 5.0]))
    assert torch.equal(whole, floats)


@pytest.mark.usefixtures("program")
def test_damaged_weights_are_noticed():
    model = sharp(CONFIG)
    engine = Engine(for_decoding(model))
    engine.add(Request(tokens=[1], max_new_tokens=9))
    engine.step()
    engine.model.blocks[0].feed_forward.down.weight[:] = torch.nan
    engine.step()
    (error,) = engine.failed.values()
    assert "not finite" in str(error)


def replaced(path: str, module: nn.Module):
    def change(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)

    return change


CHANGES = {
    "another epsilon": lambda model: setattr(model.final_norm, "eps", 1e-3),
    "a norm without weights": replaced("final_norm", nn.LayerNorm(64, elementwise_affine=False)),
    "a norm without a bias": replaced("blocks.1.attention_norm", nn.LayerNorm(64, bias=False)),
    "another GELU": replaced("blocks.0.feed_forward.activation", nn.GELU()),
    "a narrow layer": lambda model: (
        replaced("blocks.0.feed_forward.up", nn.Linear(64, 96))(model),
        replaced("blocks.0.feed_forward.down", nn.Linear(96, 64))(model),
    ),
    "a smaller head": replaced("head", nn.Linear(64, 300, bias=False)),
    "another number of heads": lambda model: setattr(model.blocks[1].attention, "num_heads", 2),
    "a block less": lambda model: model.blocks.__delitem__(0),
    "a hook": lambda model: model.blocks[0].register_forward_hook(lambda *_: None),
    "a replaced method": lambda model: setattr(model.final_norm, "forward", lambda x: x),
    "LoRA": replaced("blocks.0.attention.W_query", nn.Sequential(nn.Linear(64, 64))),
}


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_has_no_compiled_step(name):
    model = sharp(CONFIG)
    assert CompiledStep.of(model) is None
    assert CompiledStep.of(for_decoding(model)).ready
    CHANGES[name](model)
    assert CompiledStep.of(for_decoding(model)) is None


def test_widths_that_are_no_whole_vectors_have_no_compiled_step():
    narrow = GPTConfig(vocab_size=50, context_length=8, emb_dim=48, num_heads=3, num_layers=1)
    assert CompiledStep.of(for_decoding(sharp(narrow))) is None


def test_a_text_stays_with_what_it_began_with(folder, monkeypatch):
    monkeypatch.setenv("GPT_CACHE", str(folder))
    engine = Engine(for_decoding(sharp(CONFIG)))
    monkeypatch.setattr(CompiledStep, "ready", False)
    engine.add(Request(tokens=[1], max_new_tokens=6))
    engine.step()
    monkeypatch.setattr(CompiledStep, "ready", True)
    engine.add(Request(tokens=[2], max_new_tokens=3))
    while engine.running:
        assert not engine._program
        engine.step()
    engine.add(Request(tokens=[1], max_new_tokens=6))
    engine.step()
    assert engine._program


@pytest.mark.usefixtures("program")
def test_what_others_can_write_is_not_run(folder, monkeypatch):
    fast, place = for_decoding(sharp(CONFIG)), folder / "compiled"
    for path, mode in ((place / compiled._name(), 0o722), (place, 0o777)):
        assert CompiledStep.of(fast).ready
        path.chmod(mode)
        assert not CompiledStep.of(fast).ready
        path.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # whose files are not those of this user
    step = CompiledStep.of(fast)
    assert not step.ready and step._path.parent != place


@pytest.mark.usefixtures("no_program")
def test_a_program_is_kept_where_others_cannot_write(tmp_path):
    before = os.umask(0o002)
    try:
        step = CompiledStep.of(for_decoding(sharp(CONFIG)))
        compiled.compile_step(step._path)
    finally:
        os.umask(before)
    assert step.ready and step._path.parent == tmp_path / "compiled"
    assert [path.stat().st_mode & 0o777 for path in (step._path, step._path.parent)] == [0o700, 0o700]


def test_a_cache_folder_that_cannot_be_reached(monkeypatch, tmp_path):
    monkeypatch.setenv("GPT_CACHE", str(tmp_path / ("x" * 300)))
    assert not CompiledStep.of(for_decoding(sharp(CONFIG))).ready


@pytest.mark.usefixtures("no_program")
def test_only_a_model_that_is_large_enough_is_compiled_for(monkeypatch):
    begun = []
    monkeypatch.setattr(compiled, "_compile_once", begun.append)
    fast = for_decoding(sharp(CONFIG))
    Engine(fast)
    assert not begun
    monkeypatch.setattr(compiled, "_WORTH", 1000)
    assert not Engine(fast)._compiled.ready
    assert [path.name for path in begun] == [compiled._name()]


@pytest.mark.usefixtures("no_program")
@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_without_a_compiler_one_line_says_so(compiler, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    compiled.compile_step(tmp_path / "compiled" / "step.so")
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
    fast = for_decoding(sharp(CONFIG))
    engine = Engine(fast)
    (sample,) = engine.add(Request(tokens=[1], max_new_tokens=6, sampling=Sampling(temperature=0)))
    while engine.busy:
        engine.step()
    assert sample.tokens == slow_greedy(fast, [1], 6)


def test_a_program_that_cannot_be_loaded_is_left_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("GPT_CACHE", str(tmp_path))
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / compiled._name()).write_bytes(b"of another machine")
    fast = for_decoding(sharp(CONFIG))
    for _ in range(2):
        assert not CompiledStep.of(fast).ready
    assert len(capsys.readouterr().err.splitlines()) == 1
