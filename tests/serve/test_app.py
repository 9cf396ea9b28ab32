import asyncio

import numpy as np
import pytest

from gpt.evaluation.copied import Copied
from gpt.serve.limits import RequestLimits
from tests.serve.server import (
    MODEL,
    TOKENIZER,
    alone,
    choice_of,
    connected,
    events,
    get,
    httpx,
    idle,
    listening,
    new_app,
    post,
    slow,
    streamed,
    talk,
)
from tests.snapshots import add_snapshot

JSON = {"content-type": "application/json"}
LONG = {"prompt": "Hi", "max_tokens": 2000, "temperature": 0}


def test_a_completion_is_the_models_whole_and_in_a_stream():
    form = {"prompt": ["Hi", "You"], "max_tokens": 12, "temperature": 0, "logprobs": 1}
    whole = post(new_app(), **form).json()
    assert whole["object"] == "text_completion" and whole["model"] == "tiny"
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29}
    response = post(new_app(), **form, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events(response)[-1]["usage"] == whole["usage"]
    for index, prompt in enumerate(form["prompt"]):
        choice, pieces = whole["choices"][index], streamed(response, index)
        assert choice["text"] == alone(prompt, 12, temperature=0)
        assert choice["text"] == "".join(piece["text"] for piece in pieces)
        assert choice["finish_reason"] == pieces[-1]["finish_reason"] == "length"
        for name in ("token_ids", "text_offset"):
            values = [value for piece in pieces for value in piece["logprobs"][name]]
            assert values == choice["logprobs"][name]


def test_a_stop_string_ends_the_text():
    form = {"prompt": "Hi", "max_tokens": 40, "seed": 3}
    whole = choice_of(post(new_app(), **form))["text"]
    for stop in (whole[5:8], ["never there", whole[5:8]]):
        choice = choice_of(post(new_app(), **form, stop=stop))
        assert choice["text"] == whole.partition(whole[5:8])[0]
        assert choice["finish_reason"] == "stop" and choice["logprobs"] is None


def test_the_openai_client_works_unchanged():
    openai = pytest.importorskip("openai", reason="openai is not installed")

    async def use(client):
        connection = {"base_url": "http://test/v1", "http_client": client, "max_retries": 0}
        ours = openai.AsyncOpenAI(api_key="secret", **connection)
        assert [model.id async for model in ours.models.list()] == ["tiny"]
        form = {"model": "tiny", "prompt": "Hi", "max_tokens": 10, "seed": 1, "extra_body": {"top_k": 20}}
        whole = await ours.completions.create(**form, n=2, logprobs=2)
        stream = await ours.completions.create(**form, stream=True)
        assert whole.choices[0].text == "".join([event.choices[0].text async for event in stream])
        with pytest.raises(openai.NotFoundError) as missing:
            await ours.completions.create(**{**form, "model": "other"})
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await ours.completions.create(**form, temperature=-1)

    talk(new_app(api_key="secret"), use)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 without echo, got 0"),
        ({"n": 3278}, "the request costs 262242, expected at most 262144: ask for fewer"),
        ({"prompt": [65] * 8192, "n": 128, "max_tokens": 1, "echo": True, "logprobs": 5}, "costs 8405888"),
        ({"prompt": []}, "at least one prompt"),
        ({"prompt": [300]}, "300"),
        ({"prompt": ["a"] * 1025}, "prompt.texts: List should have at most 1024 items"),
        ({"prompt": [[1]] * 1025}, "prompt.lists: List should have at most 1024 items"),
        ({"prompt": ["a", 5]}, "prompt.texts.1: Input should be a valid string"),
        ({"prompt": [5, "a"]}, "prompt.ids.1: Input should be a valid integer"),
        ({"prompt": [[5], [-1]]}, "prompt.lists.1.0: Input should be greater than or equal to 0"),
        ({"prompt": 5}, "prompt: expected a text, a list of texts, a list of ids or a list of such lists"),
        ({"stop": ["a"] * 17}, "stop.list: List should have at most 16 items"),
        ({"stop": ["a", "a" * 257]}, "stop.list.1: String should have at most 256 characters"),
        ({"stop": 5}, "stop: expected a text or a list of texts"),
        ({"prompt": [True]}, "prompt.ids.0: Input should be a valid integer"),
        ({"seed": "1_0"}, "seed: Input should be a valid integer"),
        ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
        ({"temperature": "0.5"}, "temperature: Input should be a valid number"),
        ({"logprobs": True}, "logprobs: a completion takes a number"),
        ({"logprobs": 6}, "logprobs"),
        ({"colour": 1}, "colour: there is no such field"),
        ({str(n): n for n in range(513)}, "the body has 513 errors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_field_is_named(form, message):
    response = post(new_app(), **{"prompt": "Hi", **form})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "message"),
    [
        pytest.param("POST", "/v1/completions", {"content": b"{}"}, 415, "application/json", id="no type"),
        pytest.param("GET", "/v1/completions", {}, 405, "", id="no body"),
        pytest.param("GET", "/v1/models/runs/other", {}, 404, "'runs/other', expected 'tiny'", id="no model"),
        pytest.param(
            "POST", "/chat/completions", {"json": {}}, 404,
            "there is no path '/chat/completions', expected /v1/chat/completions", id="no path",
        ),
    ],
)  # fmt: skip
def test_what_is_no_request_at_all(method, path, options, status, message):
    with connected(new_app()) as client:
        response = client.request(method, path, **options)
    error = response.json()["error"]
    assert response.status_code == status and message in error["message"]
    assert error["code"] == ("model_not_found" if "runs/other" in path else None)
    assert response.headers.get("allow") == ("POST" if status == 405 else None)


def test_a_body_over_the_limit_is_refused_declared_or_not():
    async def pieces():
        for _ in range(20):
            yield b" " * 100

    async def use(client):
        sent = (b" " * 2000, pieces())
        return [await client.post("/v1/completions", content=body, headers=JSON) for body in sent]

    answers = talk(new_app(limits=RequestLimits(body_bytes=1000)), use)
    assert [answer.status_code for answer in answers] == [413, 413]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(stream):
    app = new_app(slow(), limits=RequestLimits(max_seconds=1))
    response = post(app, **LONG, stream=stream)
    error = events(response)[-1] if stream else response.json()
    assert error["error"]["type"] == "server_error" and "took more than 1 s" in error["error"]["message"]
    assert response.status_code == (200 if stream else 504)
    assert idle(app)


def test_after_its_end_every_request_gets_503(tmp_path):
    add_snapshot(tmp_path, 1, MODEL, TOKENIZER)
    app = new_app(run=tmp_path)
    with connected(app) as client:
        app.state.end()
        for path in ("/v1/completions", "/attention"):
            for step in (None, 1):
                answer = client.post(path, json={"prompt": "Hi", "snapshot": step})
                assert answer.status_code == 503 and "shutting down" in answer.text, (path, step)


def test_calls_that_wait_at_the_end_get_503(caplog):
    """One runs, others wait for it."""
    app = new_app(slow(0.3))

    async def use(client):
        calls = [asyncio.create_task(client.post("/attention", json={"prompt": "Hi"})) for _ in range(3)]
        await asyncio.sleep(0.15)
        app.state.end()
        return sorted([(await call).status_code for call in calls])

    assert talk(app, use) == [200, 503, 503]
    assert not caplog.records


@pytest.mark.allow_hosts(["127.0.0.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(stream):
    app = new_app(slow(0.01))
    with listening(app) as address, httpx.Client(base_url=address, timeout=10) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                next(response.iter_text())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=LONG, timeout=0.3)
        assert idle(app)


def test_the_page_learns_what_is_copied():
    copied = Copied(np.frombuffer(b"a text that is learned by heart", np.uint8), TOKENIZER, 6)
    ids = TOKENIZER.encode("it is learned badly")
    assert post(new_app(copied=copied), "/copied", tokens=ids).json() == {"runs": copied.runs(ids)}
    for tokens in ([-1], [1] * 16_385):
        assert post(new_app(copied=copied), "/copied", tokens=tokens).status_code == 400
    assert post(new_app(), "/copied", tokens=[]).status_code == 404


def test_no_other_site_shows_the_page_in_a_frame():
    policy = get(new_app(), "/").headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy.split("; ")
