"""What a client or a fault does to the server does not touch the requests of others."""

import asyncio
import gc
import json
import time
from collections import Counter
from itertools import groupby
from threading import get_ident

import pytest
import torch

from gpt.serve.app import create_app
from gpt.serve.errors import SERVER_FAILED
from gpt.serve.limits import RequestLimits
from gpt.serve.requests import log_probabilities
from gpt.text.tokenizer import Tokenizer
from tests.serve.server import (
    MODEL,
    TOKENIZER,
    alone,
    choice_of,
    connected,
    events,
    hooked,
    idle,
    new_app,
    slow,
    talk,
)

GOOD = {"prompt": "Hi", "max_tokens": 30, "temperature": 0}


def has_z(tokens):
    """Which texts (B,) of token ids (B, T) have a Z."""
    return (tokens == TOKENIZER.encode("Z")[0]).any(dim=1)


def not_finite(tokens, features):
    return torch.where(has_z(tokens)[:, None, None], torch.nan, features)


def raising(tokens, features):
    if has_z(tokens).any() and tokens.shape[1] < 8:  # not the text by which the engine compares
        raise RuntimeError("a fault of this prompt")
    return features


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [not_finite, raising])
def test_a_poisoned_request_changes_nothing_for_the_one_beside_it(fault, stream, caplog):
    async def use(client):
        good = asyncio.create_task(client.post("/v1/completions", json=GOOD))
        await asyncio.sleep(0.02)
        form = {**GOOD, "prompt": "Z", "stream": stream}
        return [await client.post("/v1/completions", json=form) for _ in range(3)], await good

    answers, good = talk(new_app(hooked(fault)), use)
    assert choice_of(good)["text"] == alone("Hi", 30, temperature=0)
    for answer in answers:
        error = events(answer)[-1] if stream else answer.json()
        told = {"message": SERVER_FAILED, "type": "server_error", "param": None, "code": None}
        assert error["error"] == told
    assert caplog.records


def test_attention_does_not_starve_completions():
    """Thirty-two clients on /attention, one step of a completion between two of their calls."""

    async def use(client):
        async def ask():
            while not done.is_set():
                answers.append((await client.post("/attention", json={"prompt": "Hiya"})).status_code)

        done, answers = asyncio.Event(), []
        clients = [asyncio.create_task(ask()) for _ in range(32)]
        completion = await client.post("/v1/completions", json={**GOOD, "max_tokens": 10})
        done.set()
        await asyncio.gather(*clients)
        return completion, answers

    completion, answers = talk(new_app(slow(0.01)), use)
    assert choice_of(completion)["text"] == alone("Hi", 10, temperature=0)
    assert set(answers) == {200} and len(answers) < 32 + 25


def talk_raw(app, receive, send):
    """Run one request with the two functions of ASGI, and let the application tidy up."""
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
        "server": ("test", 80), "client": ("127.0.0.1", 1), "root_path": "", "query_string": b"",
    }  # fmt: skip

    async def main():
        async with app.router.lifespan_context(app):
            await asyncio.wait_for(app(scope, receive, send), 20)
            await asyncio.sleep(0.1)

    asyncio.run(main())


def sending(form):
    """What a client sends that then waits."""
    messages = [{"type": "http.request", "body": json.dumps(form).encode()}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    return receive


def test_a_body_that_trickles_is_ended():
    async def trickle():
        await asyncio.sleep(0.1)
        return {"type": "http.request", "body": b" ", "more_body": True}

    sent = []

    async def send(message):
        sent.append(message)

    talk_raw(new_app(limits=RequestLimits(arrival_seconds=1)), trickle, send)
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]


def test_a_stream_that_nobody_reads_is_ended():
    app, sent = new_app(limits=RequestLimits(max_seconds=1, last_seconds=1)), []

    async def send(message):
        sent.append(message["type"])
        if len(sent) == 3:
            await asyncio.Event().wait()  # the client takes nothing more

    talk_raw(app, sending({**GOOD, "stream": True}), send)
    assert len(sent) == 3 and idle(app)


# The answer to a long prompt comes at once, and a tenth of a millisecond per token adds up.
LARGE = {"prompt": [65] * 60, "n": 16, "max_tokens": 0, "echo": True, "logprobs": 5}


@pytest.fixture
def making(monkeypatch):
    """Calls a function before each part of an answer is made."""

    def call(function):
        def noted(*arguments):
            function()
            return log_probabilities(*arguments)

        monkeypatch.setattr("gpt.serve.app.log_probabilities", noted)

    return call


def test_a_large_answer_is_made_beside_the_event_loop(making):
    async def use(client):
        await client.post("/v1/completions", json=LARGE)
        return get_ident()

    threads = set()
    making(lambda: threads.add(get_ident()))
    loop = talk(new_app(), use)
    assert threads and loop not in threads


def test_others_have_their_turn_while_a_large_stream_is_made(making):
    def take_turns():
        turns.append("ours")
        asyncio.get_running_loop().call_soon(turns.append, "others'")

    async def send(message):
        """Take it without a turn for others, as a connection does."""

    turns = []
    making(take_turns)
    talk_raw(new_app(), sending({**LARGE, "stream": True}), send)
    in_a_row = [len(list(group)) for turn, group in groupby(turns) if turn == "ours"]
    assert sum(in_a_row) == 960 and max(in_a_row) <= 8


def test_all_that_is_open_has_a_cost():
    """A second request of half the room is admitted, a third is not."""
    app = new_app(slow(0.005), limits=RequestLimits(most_open_cost=300))

    async def use(client):
        form = {**GOOD, "max_tokens": 66}  # two tokens of a prompt, 66 new ones, 64 for the text: 132
        together = await asyncio.gather(*(client.post("/v1/completions", json=form) for _ in range(3)))
        later = await client.post("/v1/completions", json=form)
        return sorted(answer.status_code for answer in together), later.status_code

    assert talk(app, use) == ([200, 200, 503], 200)


class SlowTokenizer(Tokenizer):
    """One that takes its time for a long text."""

    def encode(self, text):
        if len(text) > 20_000:
            time.sleep(0.1)
            text = text[:1]
        return super().encode(text)


def test_long_texts_do_not_keep_short_ones_from_being_tokenized():
    app = create_app(
        MODEL, SlowTokenizer("gpt2", vocab_size=257), limits=RequestLimits(most_waiting_bytes=500_000)
    )
    ended = []

    async def use(client):
        async def ask(prompt):
            answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            ended.append((len(prompt), answer.status_code))

        await asyncio.gather(*(ask("a" * 40_000) for _ in range(14)), ask("Hi"))

    talk(app, use)
    assert Counter(ended) == {(40_000, 200): 12, (40_000, 503): 2, (2, 200): 1}
    assert ended.index((2, 200)) < 6  # the refused ones come first, the long ones two at a time


DIGITS = b"9" * 4300
HOSTILE = {
    "a million errors": b'{"prompt": [' + b"[]," * 340_000 + b"[]]}",
    "nested brackets": b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "many options": b'{"stream_options": {' + b",".join(b'"a%d":7' % i for i in range(80_000)) + b"}}",
    "a long number": b'{"seed": ' + b"9" * 1_000_000 + b"}",
    "many tokens": b'{"n": 2147483647, "max_tokens": ' + DIGITS + b"}",
    "many tokens of a chat": b'{"n": 2147483647, "max_completion_tokens": ' + DIGITS + b"}",
    "a large id": b'{"prompt": [' + DIGITS + b"]}",
    "a large top-k": b'{"top_k": ' + DIGITS + b"}",
    "not a number": b'{"temperature": NaN}',
    "half a character": b'{"prompt": "\\ud800"}',
    "a long word": b'{"prompt": "' + b"a" * 1_000_000 + b'"}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_body_is_refused_at_once(body):
    gc.freeze()  # the garbage collector does not search what earlier tests left
    with connected(new_app()) as client:
        started = time.process_time()
        answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        seconds = time.process_time() - started
    gc.unfreeze()
    assert answer.status_code == 400, answer.text[:300]
    assert len(answer.text) < 2000
    assert seconds < 2  # of this process, so that a busy machine does not count


def test_every_path_but_the_page_and_the_health_needs_the_key():
    paths = ["/", "/health", "/about", "/v1/models", "/v1/models/tiny"]
    paths += ["/attention", "/new", "/v1//models", "/docs"]

    with connected(new_app(api_key="secret")) as client:
        assert [path for path in paths if client.get(path).status_code != 401] == ["/", "/health"]
        refused = client.get("/about")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["code"] == "invalid_api_key"
