"""The training of a run: its losses, and text and attention of its snapshots."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from starlette.exceptions import HTTPException

from gpt.attention import capture_weights
from gpt.evaluation.copied import Copied
from gpt.generation import for_decoding, generate
from gpt.serve.history import History
from gpt.serve.limits import RequestLimits
from gpt.weights.load import load
from tests.generation.conftest import sharp
from tests.serve.server import MODEL, TOKENIZER, choice_of, connected, httpx, listening, new_app, post
from tests.snapshots import add_snapshot

FORM = {"prompt": "Hi", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def run(tmp_path):
    for step, loss in ((1, 6.0), (16, 5.0), (64, 3.5)):
        add_snapshot(tmp_path / "run", step, sharp(MODEL.config, seed=step), TOKENIZER, loss)
    return tmp_path / "run"


def test_the_page_learns_about_the_model_and_its_run_which_still_trains(run):
    figures = {"parameters": MODEL.num_parameters(), "text": None, "bits_per_byte": None, "minutes": None}
    curve = {"snapshots": [1, 16, 64, 80], "train": [[1, 6.0], [16, 5.0], [64, 3.5]]}
    app = new_app(run=run, copied=Copied(np.zeros(9, np.uint8), TOKENIZER))
    with connected(app) as client:
        assert client.get("/about").json()["snapshots"] == [1, 16, 64]
        add_snapshot(run, 80, MODEL, TOKENIZER, float("nan"))
        about = client.get("/about").json()
        assert about == {"id": "tiny", "figures": figures, "chat": False, "copied": True, **curve}
        assert client.post("/v1/completions", json={**FORM, "snapshot": 80}).status_code == 200


@torch.no_grad()
def attention_of(model, ids, start=0):
    """The last token's weights (layers, heads, tokens), where the first token has the position `start`."""
    positions = torch.arange(start, start + len(ids))[None]
    with capture_weights(model) as captured:
        model(torch.tensor([ids]), positions=positions)
    return torch.stack([layer[0, :, -1] for layer in captured.values()])


@pytest.mark.parametrize("step", [None, 1, 64])
def test_text_and_attention_of_a_step_are_those_of_its_weights(run, step):
    model = load(next(run.glob(f"snapshots/step-{step}-*")))[0] if step else MODEL
    (row,) = generate(model, [TOKENIZER.encode("Hi")], max_new_tokens=12, temperature=0)
    text = choice_of(post(new_app(run=run), **FORM, snapshot=step))["text"]
    assert text == TOKENIZER.decode(row[2:]).partition("<|endoftext|>")[0]

    form = {"prompt": "Hiya", "tokens": TOKENIZER.encode("you"), "snapshot": step}
    answer = post(new_app(run=run), "/attention", **form).json()
    assert answer["tokens"] == list("Hiyayou")
    expected = attention_of(model, TOKENIZER.encode("Hiyayou"))
    torch.testing.assert_close(torch.tensor(answer["weights"]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("most", [256, 20])
def test_attention_is_that_of_the_window_in_generation(most):
    """80 tokens in a context of 64: the model sees those from 32 on, and the last `most` are shown."""
    ids = TOKENIZER.encode("abcdefgh" * 10)
    app = new_app(limits=RequestLimits(attention_tokens=most))
    answer = post(app, "/attention", prompt=ids, tokens=[]).json()
    shown = ids[max(32, len(ids) - most) :]
    expected = attention_of(MODEL, shown, start=48 - len(shown))
    assert len(ids) == 80 and len(answer["tokens"]) == len(shown)
    torch.testing.assert_close(torch.tensor(answer["weights"]), expected, atol=1e-4, rtol=0)


def test_attention_is_that_of_one_prompt():
    response = post(new_app(), "/attention", prompt=["one", "two"])
    assert response.status_code == 400 and "prompt: expected one, got 2" in response.text


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_a_snapshot_computes_in_the_precision_of_the_model(precision, built, tmp_path):
    model = sharp(replace(MODEL.config, num_heads=2))  # heads of a width that the program computes
    path = add_snapshot(tmp_path, 64, model, TOKENIZER)
    app = new_app(for_decoding(load(path)[0], precision), run=tmp_path, precision=precision)
    with connected(app) as client:
        own, other = (
            client.post("/v1/completions", json={**FORM, "snapshot": step, "logprobs": 5})
            for step in (None, 64)
        )
    assert choice_of(other) == choice_of(own)
    assert choice_of(other) != choice_of(post(new_app(load(path)[0]), **FORM, logprobs=5))


@pytest.mark.parametrize(
    ("step", "status", "message"),
    [(2, 404, "there is no snapshot of step 2"), (-1, 400, "snapshot"), (16, 500, "cannot be loaded")],
    ids=["missing", "no step", "damaged"],
)
def test_what_cannot_be_shown_is_one_line_and_the_log_has_the_cause(step, status, message, run, caplog):
    damaged = next(run.glob("snapshots/step-16-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    response = post(new_app(run=run), **FORM, snapshot=step)
    assert response.status_code == status
    error = response.json()["error"]["message"]
    assert message in error and "\n" not in error and str(run) not in error
    assert (damaged.name in caplog.text) == (status == 500)


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
    assert read in ([1], [1, 1])  # the one that was begun, perhaps 64, then 64; none beside another


@pytest.mark.parametrize(
    ("path", "more"),
    [("/v1/completions", {}), ("/v1/completions", {"stream": True}), ("/attention", {})],
    ids=["completion", "stream", "attention"],
)
def test_a_load_counts_in_the_time_of_a_request_and_goes_on(path, more, run, monkeypatch):
    read = []

    def slowly(path):
        read.append(path)
        time.sleep(1.5)
        return load(path)

    monkeypatch.setattr("gpt.serve.app.load", slowly)
    form = {"prompt": "Hi", "snapshot": 1, **more}
    with connected(new_app(run=run, limits=RequestLimits(max_seconds=1))) as client:
        late = client.post(path, json=form)
        assert late.status_code == 504 and "more than 1 s" in late.text
        assert client.post(path, json=form).status_code == 200
    assert len(read) == 1


def test_a_load_that_ends_after_the_server_answers_nobody(run):
    async def main():
        def ending(path):
            loop.call_soon_threadsafe(history.end)
            time.sleep(0.1)
            return made.append(StandIn(path)) or made[0]

        made, loop = [], asyncio.get_running_loop()
        history = History(StandIn(None), run, ending, 2)
        for step in (1, 16):
            with pytest.raises(HTTPException) as caught:
                await history.engine(step)
            assert caught.value.status_code == 503
        await asyncio.sleep(0.2)
        assert len(made) == 1 and made[0].stopped and history.own.stopped

    asyncio.run(main())
