"""The training of a run: its losses, and text and attention of its snapshots."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from starlette.exceptions import HTTPException

from gpt.generation import for_decoding, generate
from gpt.generation.compiled import Compiled
from gpt.serve.history import History
from gpt.weights.load import load
from tests.generation.conftest import sharp
from tests.serve.server import MODEL, TOKENIZER, choice_of, connected, get, httpx, listening, new_app, post
from tests.snapshots import add_snapshot

FORM = {"prompt": "Hi", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def run(tmp_path):
    for step, loss in ((1, 6.0), (16, 5.0), (64, 3.5)):
        add_snapshot(tmp_path / "run", step, other(step), TOKENIZER, loss)
    return tmp_path / "run"


def other(seed: int):
    """A model with other weights."""
    torch.manual_seed(seed)
    return type(MODEL)(MODEL.config).eval()


def test_the_losses_are_those_of_the_snapshots(run):
    add_snapshot(run, 80, other(80), TOKENIZER, float("nan"))
    about = get(new_app(run=run), "/about").json()
    assert about["snapshots"] == [1, 16, 64, 80] and about["train"] == [[1, 6.0], [16, 5.0], [64, 3.5]]


@pytest.mark.parametrize("step", [1, 64])
def test_a_snapshot_writes_the_text_of_its_weights(run, step):
    response = post(new_app(run=run), **FORM, snapshot=step)
    (path,) = run.glob(f"snapshots/step-{step}-*")
    model = for_decoding(load(path)[0])
    (row,) = generate(model, [TOKENIZER.encode("Hi")], max_new_tokens=12, temperature=0)
    assert choice_of(response)["text"] == TOKENIZER.decode(row[2:])


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
def test_a_snapshot_computes_in_the_precision_of_the_model(precision, built, tmp_path):
    model = sharp(replace(MODEL.config, num_heads=2))  # heads of a width that the program computes
    add_snapshot(tmp_path / "run", 64, model, TOKENIZER, 3.5)
    app = new_app(for_decoding(model, precision), run=tmp_path / "run", precision=precision)
    assert post(app, **FORM, snapshot=64).status_code == 200
    (engine,) = app.state.service.history.engines.values()
    is_bfloat16 = engine.model.head.weight.dtype == torch.bfloat16
    backend = engine._engine._backend
    rounding = backend.rounding if isinstance(backend, Compiled) else None
    assert (is_bfloat16, rounding) == (True, None) if precision == "bfloat16" else (False, precision)


def test_the_attention_is_the_snapshots(run):
    own, first, last = (
        post(new_app(run=run), "/attention", prompt="Hiya", snapshot=step).json()["weights"]
        for step in (None, 1, 64)
    )
    assert own != first != last
    assert (len(last), len(last[0]), len(last[0][0])) == (2, 4, 4)


@pytest.mark.parametrize(
    ("snapshot", "status", "message"),
    [
        (2, 404, "there is no snapshot of step 2"),
        (-1, 400, "snapshot"),
        (16, 500, "cannot be read"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/attention"])
def test_what_cannot_be_shown_is_one_line(path, snapshot, status, message, run):
    damaged = next(run.glob("snapshots/step-16-*"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    response = post(new_app(run=run), path, prompt="Hi", snapshot=snapshot)
    assert response.status_code == status
    error = response.json()["error"]["message"]
    assert message in error and "\n" not in error and str(run) not in error


class StandIn:
    """In the place of a thread with a model."""

    def __init__(self, path):
        self.open, self.stopped = set(), False

    def end(self):
        self.stopped = True


def test_few_are_in_memory_and_none_that_is_in_use_goes(run):
    async def main():
        history = History(None, run, StandIn, 2)
        first, second = await history.engine(1), await history.engine(16)
        assert await history.engine(1) is first
        third = await history.engine(64)  # the one that was used last stays
        assert second.stopped and not first.stopped
        first.open = {1}
        again = await history.engine(16)
        assert third.stopped and not first.stopped
        again.open = {1}
        with pytest.raises(HTTPException, match="too many snapshots are in use") as caught:
            await history.engine(64)
        assert caught.value.status_code == 503

    asyncio.run(main())


@pytest.mark.allow_hosts(["127.0.0.1"])
def test_the_loads_of_clients_that_left_do_not_pile_up(run, monkeypatch):
    read, at_once = [], []

    def slowly(path):
        at_once.append(path)
        read.append(len(at_once))
        time.sleep(0.2)
        at_once.pop()
        return load(path)

    monkeypatch.setattr("gpt.serve.app.load", slowly)
    with listening(new_app(run=run)) as address, httpx.Client(base_url=address) as client:

        def ask(step, seconds):
            return client.post("/v1/completions", json={**FORM, "snapshot": step}, timeout=seconds)

        def leave(step):
            with pytest.raises(httpx.ReadTimeout):
                ask(step, 0.05)

        with ThreadPoolExecutor() as clients:
            list(clients.map(leave, (1, 16, 64) * 3))
        assert ask(64, 30).status_code == 200
    assert read == [1, 1, 1]  # each once, and none beside another


def test_new_snapshots_appear_while_the_server_runs(run):
    form = {**FORM, "snapshot": 80}
    with connected(new_app(run=run)) as client:
        assert client.post("/v1/completions", json=form).status_code == 404
        add_snapshot(run, 80, other(80), TOKENIZER)
        assert client.get("/about").json()["snapshots"] == [1, 16, 64, 80]
        assert client.post("/v1/completions", json=form).status_code == 200
