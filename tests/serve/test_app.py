import numpy as np
import pytest

from gpt.evaluation.copied import Copied
from gpt.serve.limits import Limits
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

JSON = {"content-type": "application/json"}


def test_a_completion_is_the_models():
    response = post(new_app(), prompt="Hi", max_tokens=20, temperature=0)
    choice, body = choice_of(response), response.json()
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    assert choice["text"] == alone("Hi", 20, temperature=0)
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22}


def test_a_stop_string_ends_the_text():
    form = {"prompt": "Hi", "max_tokens": 40, "seed": 3}
    whole = choice_of(post(new_app(), **form))["text"]
    end = whole[5:8]
    for stop in (end, [end, "never there"]):
        choice = choice_of(post(new_app(), **form, stop=stop))
        assert choice["text"] == whole.partition(end)[0]
        assert choice["finish_reason"] == "stop"


def test_the_stream_adds_up_to_the_answer():
    form = {"prompt": ["Hi", "You"], "max_tokens": 12, "seed": 2, "logprobs": 1}
    whole = post(new_app(), **form).json()
    response = post(new_app(), **form, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events(response)[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        pieces = streamed(response, index)
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("token_ids", "text_offset"):
            values = [value for piece in pieces for value in piece["logprobs"][name]]
            assert values == choice["logprobs"][name]


def test_the_openai_client_works_unchanged():
    openai = pytest.importorskip("openai", reason="openai is not installed")

    async def use(client):
        ours = openai.AsyncOpenAI(
            api_key="secret", base_url="http://test/v1", http_client=client, max_retries=0
        )
        models = [model.id async for model in ours.models.list()]
        form = {"prompt": "Hi", "max_tokens": 10, "seed": 1, "extra_body": {"top_k": 20}}
        whole = await ours.completions.create(model="tiny", **form, n=2, logprobs=2, stop=["\x00"])
        stream = await ours.completions.create(model="tiny", **form, stream=True)
        streamed = "".join([event.choices[0].text async for event in stream])
        with pytest.raises(openai.NotFoundError):
            await ours.completions.create(model="other", prompt="Hi")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await ours.completions.create(model="tiny", **form, temperature=-1)
        return models, whole, streamed

    models, whole, streamed = talk(new_app(api_key="secret"), use)
    assert models == ["tiny"]
    assert len(whole.choices) == 2 and whole.usage.completion_tokens == 20
    assert len(whole.choices[0].logprobs.tokens) == 10
    assert whole.choices[0].text == streamed


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 without echo, got 0"),
        ({"n": 3278}, "the request costs 262242, expected at most 262144: ask for fewer"),
        ({"prompt": [65] * 8192, "n": 128, "max_tokens": 1, "echo": True, "logprobs": 5}, "costs 7357312"),
        ({"prompt": []}, "at least one prompt"),
        ({"prompt": [300]}, "300"),
        ({str(n): n for n in range(513)}, "the body has 513 errors"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"logprobs": 6}, "logprobs"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_bad_field_is_named(form, message):
    response = post(new_app(), **{"prompt": "Hi", **form})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        pytest.param("POST", "/v1/completions", {"content": b"{", "headers": JSON}, 400, id="no JSON"),
        pytest.param("POST", "/v1/completions", {"content": b"{}"}, 415, id="no content type"),
        pytest.param("GET", "/v1/completions", {}, 405, id="no body"),
        pytest.param("GET", "/nothing", {}, 404, id="no path"),
        pytest.param("POST", "/v1/completions", {"json": {"model": "other"}}, 404, id="no model"),
    ],
)
def test_what_is_no_request_at_all(method, path, options, status):
    with connected(new_app()) as client:
        assert client.request(method, path, **options).status_code == status


def test_a_body_over_the_limit_is_refused_declared_or_not():
    async def pieces():
        for _ in range(20):
            yield b" " * 100

    async def use(client):
        declared = await client.post("/v1/completions", content=b" " * 2000, headers=JSON)
        undeclared = await client.post("/v1/completions", content=pieces(), headers=JSON)
        assert declared.json() == undeclared.json()
        return declared.status_code, undeclared.status_code

    assert talk(new_app(limits=Limits(body_bytes=1000)), use) == (413, 413)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(stream):
    app = new_app(slow(), limits=Limits(seconds=1))
    response = post(app, prompt="Hi", max_tokens=2000, temperature=0, stream=stream)
    error = events(response)[-1] if stream else response.json()
    assert error["error"]["code"] == 504
    assert stream or response.status_code == 504
    assert idle(app)


@pytest.mark.allow_hosts(["127.0.0.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place(stream):
    app = new_app(slow(0.01))
    form = {"model": "tiny", "prompt": "Hi", "max_tokens": 2000, "temperature": 0, "stream": stream}
    with listening(app) as address, httpx.Client(base_url=address, timeout=10) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=form) as response:
                next(response.iter_text())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=form, timeout=0.3)
        assert idle(app)


def test_attention_of_the_last_token():
    body = post(new_app(), "/attention", prompt="Hiya", tokens=TOKENIZER.encode("you")).json()
    assert "".join(body["tokens"]) == "Hiyayou"
    weights = body["weights"]
    assert (len(weights), len(weights[0]), len(weights[0][0])) == (2, 4, 7)
    assert all(sum(head) == pytest.approx(1, abs=1e-3) for layer in weights for head in layer)


def test_the_page_learns_about_the_model():
    copied = Copied(np.zeros(9, np.uint8), TOKENIZER)
    figures = {"parameters": MODEL.num_parameters(), "text": None, "bits_per_byte": None, "minutes": None}
    marks = {"chat": False, "copied": True, "snapshots": [], "train": []}
    assert get(new_app(copied=copied), "/about").json() == {"id": "tiny", "figures": figures, **marks}


def test_the_page_learns_what_is_copied():
    copied = Copied(np.frombuffer(b"a text that is learned by heart", np.uint8), TOKENIZER, 6)
    ids = TOKENIZER.encode("it is learned badly")
    assert post(new_app(copied=copied), "/copied", tokens=ids).json() == {"runs": copied.runs(ids)}
    for tokens in ([-1], ["x"]):
        assert post(new_app(copied=copied), "/copied", tokens=tokens).status_code == 400
    assert post(new_app(), "/copied", tokens=[]).status_code == 404


def test_no_other_site_shows_the_page_in_a_frame():
    policy = get(new_app(), "/").headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy.split("; ")


def test_the_model_may_be_left_out_and_looked_up():
    with connected(new_app()) as client:
        form = {"prompt": "Hi", "max_tokens": 3}
        assert client.post("/v1/completions", json=form).json()["model"] == "tiny"
        assert client.get("/v1/models/tiny").json()["id"] == "tiny"
        refused = client.get("/v1/models/runs/other").json()["error"]["message"]
    assert "runs/other" in refused and "tiny" in refused
