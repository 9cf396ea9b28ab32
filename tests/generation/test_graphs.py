"""Steps as CUDA graphs, on the CPU: a recorder in the place of CUDA's replays the same operations on the same
memory, so that whatever a graph would have fixed, a number of the host for example, is fixed here too.
"""

import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpt import GPT, GPTConfig, Tokenizer
from gpt.generation import Engine, Request, Sampling, decoding, graphs
from gpt.generation.decoding import decoder_of
from gpt.generation.forward import Forward
from gpt.generation.graphs import replayed
from tests.generation.conftest import sharp

GREEDY = Sampling(temperature=0)


class Recording(TorchDispatchMode):
    """Stands for `torch.cuda.CUDAGraph`."""

    replays = count = 0

    def __init__(self):
        super().__init__()
        Recording.count += 1
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        Recording.replays += 1
        for function, args, kwargs, out in self.calls:
            again = function(*args, **kwargs)
            for held, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(held, torch.Tensor) and held.data_ptr() != new.data_ptr():
                    held.copy_(new)

    def pool(self):
        return "the pool"


@pytest.fixture
def recorder(monkeypatch):
    """CUDA's functions for graphs, of a machine that has none."""
    capturing = []

    @contextmanager
    def graph(recording, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local" and stream == "beside"
        capturing.append(recording)
        with recording:
            yield
        capturing.pop()

    monkeypatch.setattr(graphs, "_off", threading.Event())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "here")
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "beside")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(GPT, "_check", lambda *_: None)  # reads ids where tensors are on a CPU
    monkeypatch.setattr(Recording, "replays", 0)


@pytest.fixture
def on_a_gpu(recorder, monkeypatch):
    """Engines decode as on a GPU, but for the place of their tensors."""
    original = Forward.__init__

    def init(self, model, *, cached, graphs=False):
        original(self, model, cached=cached)
        self.graphs = graphs and cached

    monkeypatch.setattr(Forward, "__init__", init)


def texts(engine: Engine, requests: list[Request]) -> list[list[int]]:
    samples = [sample for request in requests for sample in engine.add(request)]
    for _ in engine.run():
        pass
    return [sample.tokens for sample in samples]


REQUESTS = [
    Request(tokens=[5, 6, 7], max_new_tokens=150, sampling=GREEDY),
    Request(tokens=[250] * 40, max_new_tokens=60, seed=1, samples=2),
    Request(tokens=[9], max_new_tokens=90, seed=2, sampling=Sampling(top_k=5)),
]


@pytest.mark.parametrize("ahead", [1, 8])
def test_texts_by_graphs_are_those_without(ahead, on_a_gpu):
    """Rows join and leave, memory grows, the window slides; another engine replays the same recordings."""
    config = GPTConfig(vocab_size=300, context_length=256, emb_dim=32, num_heads=4, num_layers=2)
    model = sharp(config)
    expected = texts(Engine(model, graphs=False), REQUESTS)
    assert Recording.replays == 0
    for most_recorded in (20, 20, 0):  # memory grew, and took the first recordings with it
        engine, before = Engine(model), Recording.count
        engine._ahead = ahead
        assert texts(engine, REQUESTS) == expected
        assert Recording.count - before <= most_recorded
    assert Recording.replays > 200
    (cache,) = decoder_of(model).caches
    assert {columns for _, columns in cache.recorded} <= {64, 128, 256}


def test_a_recording_is_made_the_second_time(recorder):
    recordings, calls, numbers = {}, [], torch.zeros(2)

    def function(x):
        calls.append(x)
        return x + numbers

    for i in range(5):
        numbers.fill_(i)  # memory that the recording reads
        assert replayed(recordings, "key", function, torch.full((2,), 10.0 * i)).tolist() == [11.0 * i] * 2
    assert len(calls) == 3  # as it is, to record it, and to compare
    assert Recording.replays == 4


def refuse(*_, **__):
    try:
        raise RuntimeError("operation not permitted\nmore")
    finally:
        raise RuntimeError("the end of the recording failed because of it")


@pytest.mark.parametrize(
    ("name", "instead", "reason"),
    [("graph", refuse, "operation not permitted"), (None, None, "a replay gives another result")],
)
def test_a_failure_switches_graphs_off_for_the_process(name, instead, reason, monkeypatch, recorder, capsys):
    state = torch.zeros(1)
    if name:
        monkeypatch.setattr(torch.cuda, name, instead)
    for recordings in ({}, {}):
        for _ in range(4):

            def function(x):
                return x * 1 if name else x + state.add_(1)[0].clone()

            assert replayed(recordings, "key", function, torch.ones(1)).item() == (1 if name else state + 1)
    assert graphs._off.is_set()
    assert capsys.readouterr().err.splitlines() == [
        f"gpt: decoding is slower than it could be: its CUDA graph cannot be used: {reason}"
    ]


MIXED = [
    *REQUESTS,
    Request(tokens=[1, 2], max_new_tokens=70, seed=3, sampling=Sampling(temperature=0.7), stop=["e", "Q"]),
    Request(tokens=[3], max_new_tokens=70, seed=4, end=101),
    Request(tokens=[4] * 70, max_new_tokens=9, seed=5, sampling=Sampling(top_p=0.9, min_p=0.01)),
    Request(tokens=[8], max_new_tokens=1, seed=6),
]
LOOKING_BACK = [
    Request(tokens=[3, 4], max_new_tokens=40, seed=7, sampling=Sampling(repetition_penalty=1.5)),
    Request(tokens=[3, 4], max_new_tokens=40, seed=7, sampling=Sampling(frequency_penalty=1.0)),
    Request(tokens=[3, 4], max_new_tokens=40, seed=7, alternatives=2),
]


def everything(engine: Engine, requests: list[Request]) -> list[list[tuple]]:
    samples = [sample for request in requests for sample in engine.add(request)]
    tokens = list(engine.run())
    return [
        [(t.id, t.text, t.finished, t.log_probability) for t in tokens if t.sample is sample]
        for sample in samples
    ]


@pytest.mark.parametrize("max_samples", [2, 64])
@pytest.mark.parametrize("requests", [MIXED, MIXED + LOOKING_BACK, LOOKING_BACK])
def test_tokens_drawn_several_at_a_time_are_those_drawn_one_by_one(requests, max_samples):
    config = GPTConfig(vocab_size=257, context_length=64, emb_dim=32, num_heads=2, num_layers=2)
    model, tokenizer = sharp(config), Tokenizer("gpt2", vocab_size=257)
    expected = everything(Engine(model, tokenizer, max_samples=max_samples), requests)
    engine = Engine(model, tokenizer, max_samples=max_samples)
    engine._ahead = 8
    for found, wanted in zip(everything(engine, requests), expected, strict=True):
        assert [one[:3] for one in found] == [one[:3] for one in wanted]
        assert [one[3] for one in found if one[3]] == pytest.approx(
            [one[3] for one in wanted if one[3]], abs=1e-3
        )


def test_logits_that_are_not_finite_end_their_own_text_only(model):
    model.position_embedding.weight.data[20] = torch.nan
    engine = Engine(model)
    engine._ahead = 8
    (failed,) = engine.add(Request(tokens=[1] * 15, max_new_tokens=30, sampling=GREEDY))
    (whole,) = engine.add(Request(tokens=[2], max_new_tokens=16, sampling=GREEDY))
    errors = {}
    while engine.busy:
        engine.step()
        errors |= engine.failed
    assert (failed.finished, failed.new_tokens) == ("error", 6)
    assert (whole.finished, whole.new_tokens) == ("length", 16)
    assert "not finite" in str(errors[failed]) and list(errors) == [failed]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=5, top_p=0.9, min_p=0.01)])
def test_the_host_waits_for_a_gpu_once_for_several_tokens(monkeypatch, sampling):
    """Meta tensors have no values: whatever reads one raises, but for the `tolist` that is counted."""
    with torch.device("meta"):
        model = GPT(
            GPTConfig(vocab_size=300, context_length=64, emb_dim=32, num_heads=2, num_layers=2)
        ).eval()
    monkeypatch.setattr(decoding, "_check", lambda *_: None)  # which compares numbers
    engine, reads = Engine(model), []
    samples = engine.add(Request(tokens=[1, 2], max_new_tokens=30, sampling=sampling, samples=3))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # for the check of ids alone
    monkeypatch.setattr(
        torch.Tensor,
        "tolist",
        lambda ids: (
            reads.append(tuple(ids.shape)) or torch.ones(ids.shape, device="cpu").int().numpy().tolist()
        ),
    )
    engine._ahead = 8
    engine.step()  # reads the prompt, and draws the first tokens
    engine.step()
    assert reads == [(1, 3), (8, 3)]
    assert [sample.new_tokens for sample in samples] == [9] * 3
