"""What clients of the OpenAI form rely on beyond a plain completion."""

import pytest
import torch

from gpt.generation import Sampling, stream_samples
from tests.serve.server import MODEL, TOKENIZER, alone, events, new_app, post, talk


def expected_scores(ids: list[int]) -> list[float]:
    """The log-probability of each token but the first, by a forward pass."""
    with torch.no_grad():
        scores = MODEL(torch.tensor([ids]))[0].log_softmax(-1)
    return scores[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def test_echo_returns_the_prompt_with_its_log_probabilities():
    """What lm-evaluation-harness sends: ids, echo, one token, one alternative."""
    ids = TOKENIZER.encode("Hello there")
    body = post(new_app(), prompt=ids, max_tokens=1, temperature=0, logprobs=1, echo=True).json()
    (choice,) = body["choices"]
    assert choice["text"] == "Hello there" + alone("Hello there", 1, temperature=0)
    given = choice["logprobs"]
    assert given["token_ids"][:-1] == ids
    assert given["token_logprobs"][0] is None and given["top_logprobs"][0] is None
    assert given["token_logprobs"][1:-1] == pytest.approx(expected_scores(ids), abs=1e-4)
    assert given["text_offset"] == list(range(len(ids) + 1))
    for token, score, top in zip(
        given["tokens"][1:], given["token_logprobs"][1:], given["top_logprobs"][1:], strict=True
    ):
        assert top[token] == score <= max(top.values())
    assert body["usage"] == {"prompt_tokens": 11, "completion_tokens": 1, "total_tokens": 12}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_new_tokens_only_scores(stream):
    response = post(new_app(), prompt="Hiya", max_tokens=0, logprobs=2, echo=True, stream=stream)
    assert response.status_code == 200
    answers = events(response) if stream else [response.json()]
    choices = [answer["choices"][0] for answer in answers]
    assert "".join(choice["text"] for choice in choices) == "Hiya"
    scores = [score for choice in choices for score in choice["logprobs"]["token_logprobs"]]
    assert scores[1:] == pytest.approx(expected_scores(TOKENIZER.encode("Hiya")), abs=1e-4)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_echo_without_log_probabilities_and_with_a_stop_string_in_the_prompt():
    form = {"prompt": "one two", "max_tokens": 6, "temperature": 0}
    text = post(new_app(), **form, echo=True, stop="two").json()["choices"][0]["text"]
    assert text == "one two" + alone("one two", 6, temperature=0)
    body = post(new_app(), **{**form, "prompt": ["ab", "cd"]}, echo=True, n=2).json()
    assert [choice["text"][:2] for choice in body["choices"]] == ["ab", "ab", "cd", "cd"]


def test_what_openais_form_has_and_the_engine_lacks_is_refused():
    off = {"presence_penalty": 0.0, "frequency_penalty": 0, "best_of": 1, "suffix": "", "logprobs": False}
    off |= {"stop": "", "logit_bias": {}, "user": "someone"}  # as clients send them
    assert post(new_app(), prompt="Hi", **off).status_code == 200
    for form in (
        {"presence_penalty": 1},
        {"frequency_penalty": -0.5},
        {"logit_bias": {"9": 1}},
        {"best_of": 2},
    ):
        assert next(iter(form)) in post(new_app(), prompt="Hi", **form).json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"), [("top_p", 0.3), ("min_p", 0.4), ("repetition_penalty", 50.0), ("top_k", 2)]
)
def test_each_way_of_sampling_counts(name, value):
    form = {"prompt": "Hi", "max_tokens": 30, "seed": 2}
    given = post(new_app(), **form, **{name: value}).json()["choices"][0]["text"]
    sampling = Sampling(**{name: value})
    pieces = stream_samples(MODEL, TOKENIZER, "Hi", max_new_tokens=30, seed=2, sampling=sampling)
    assert (
        given == "".join(piece for _, piece in pieces) != post(new_app(), **form).json()["choices"][0]["text"]
    )


def test_the_model_may_be_left_out_and_looked_up():
    async def use(client):
        form = {"prompt": "Hi", "max_tokens": 3}
        return [
            (await client.post("/v1/completions", json=form)).json()["model"],
            (await client.get("/v1/models/tiny")).json()["id"],
            (await client.get("/v1/models/runs/other")).json()["error"]["message"],
            await client.post("/v1/chat/completions", json={}),
        ]

    *names, refused, chat = talk(new_app(), use)
    assert names == ["tiny", "tiny"]
    assert "runs/other" in refused and "tiny" in refused
    assert chat.status_code == 400
    assert "has no template for a chat" in chat.json()["error"]["message"]
