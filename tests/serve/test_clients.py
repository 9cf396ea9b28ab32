"""What programs that score texts rely on: the prompt is returned with its log-probabilities."""

import pytest
import torch

from tests.serve.server import MODEL, TOKENIZER, alone, choice_of, new_app, post


def expected_scores(ids: list[int]) -> list[float]:
    """The log-probability of each token but the first, by a forward pass."""
    with torch.no_grad():
        scores = MODEL(torch.tensor([ids]))[0].log_softmax(-1)
    return scores[range(len(ids) - 1), ids[1:]].tolist()


def test_echo_returns_the_prompt_with_its_log_probabilities():
    """What lm-evaluation-harness sends: ids, echo, one token, one alternative."""
    ids = TOKENIZER.encode("Hello there")
    response = post(new_app(), prompt=ids, max_tokens=1, temperature=0, logprobs=1, echo=True)
    choice = choice_of(response)
    assert choice["text"] == "Hello there" + alone("Hello there", 1, temperature=0)
    logprobs = choice["logprobs"]
    assert logprobs["token_ids"][:-1] == ids
    assert logprobs["text_offset"] == list(range(len(ids) + 1))
    assert response.json()["usage"] == {"prompt_tokens": 11, "completion_tokens": 1, "total_tokens": 12}
    _, *tokens = logprobs["tokens"]
    first, *scores = logprobs["token_logprobs"]
    first_top, *tops = logprobs["top_logprobs"]
    assert first is None and first_top is None
    assert scores[:-1] == pytest.approx(expected_scores(ids), abs=1e-4)
    for token, score, top in zip(tokens, scores, tops, strict=True):
        assert top[token] == score <= max(top.values())


def test_echo_without_new_tokens_only_scores():
    choice = choice_of(post(new_app(), prompt="Hiya", max_tokens=0, logprobs=2, echo=True))
    assert (choice["text"], choice["finish_reason"]) == ("Hiya", "length")
    _, *scores = choice["logprobs"]["token_logprobs"]
    assert scores == pytest.approx(expected_scores(TOKENIZER.encode("Hiya")), abs=1e-4)


def test_echo_without_log_probabilities_and_with_a_stop_string_in_the_prompt():
    form = {"max_tokens": 6, "temperature": 0, "echo": True}
    text = choice_of(post(new_app(), prompt="one two", stop="two", **form))["text"]
    assert text == "one two" + alone("one two", 6, temperature=0)
    body = post(new_app(), prompt=["ab", "cd"], n=2, **form).json()
    assert [choice["text"][:2] for choice in body["choices"]] == ["ab", "ab", "cd", "cd"]
