"""Prompts that end inside a token, over HTTP."""

import pytest

from gpt.generation import stream_samples
from gpt.generation.sampling import Sampling
from gpt.serve.app import create_app
from tests.generation.memorised import SENTENCE, memorised, vocabulary
from tests.serve.server import events, post

TOKENIZER = vocabulary(350)
CUTS = {"a letter": 1, "a contraction": 5, "inside a word": 16, "after a blank": 25, "after a line": 43}


@pytest.fixture(scope="module")
def model():
    return memorised(TOKENIZER)


@pytest.fixture
def ask(model):
    """Post a form to a new application, as each ends after its answer."""
    return lambda **form: post(create_app(model, TOKENIZER, name="tiny"), **form)


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_prompt_is_continued_by_the_rest_of_the_sentence(ask, cut):
    form = {"prompt": SENTENCE[:cut], "max_tokens": 200, "temperature": 0}
    body = ask(**form).json()
    assert body["choices"][0]["text"] == SENTENCE[cut:]
    assert body["usage"]["prompt_tokens"] == len(TOKENIZER.encode(SENTENCE[:cut]))
    pieces = events(ask(**form, stream=True))
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == SENTENCE[cut:]


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_an_echo_has_the_tokens_of_its_text(ask, cut):
    form = {"prompt": SENTENCE[:cut], "max_tokens": 200, "temperature": 0, "echo": True, "logprobs": 1}
    (choice,) = ask(**form).json()["choices"]
    found = choice["logprobs"]
    assert choice["text"] == SENTENCE
    assert found["token_ids"] == [*TOKENIZER.encode(SENTENCE), TOKENIZER.eot]
    spoken = [
        (offset, name)
        for offset, name in zip(found["text_offset"], found["tokens"], strict=True)
        if not name.startswith(("bytes:", "<|"))
    ]
    assert all(SENTENCE.startswith(name, offset) for offset, name in spoken)
    assert all(value is None or value > -0.5 for value in found["token_logprobs"])
    new = len(found["token_ids"]) - ask(**form).json()["usage"]["completion_tokens"]
    prompt = found["prompt_token_ids"]
    assert [id_ for id_ in prompt if id_ != TOKENIZER.eot] == found["token_ids"][:new]
    pieces = [event["choices"][0]["logprobs"] for event in events(ask(**form, stream=True))]
    assert [id_ for piece in pieces for id_ in piece["token_ids"]] == found["token_ids"]
    assert [piece.get("prompt_token_ids") for piece in pieces] == [prompt] + [None] * (len(pieces) - 1)


def test_a_text_that_is_scored_has_the_tokens_that_it_has_alone(ask):
    prompt = SENTENCE[:12]
    ids = TOKENIZER.encode(prompt)
    for count in (0, 1):
        (choice,) = ask(prompt=prompt, max_tokens=count, echo=True, logprobs=0).json()["choices"]
        assert choice["logprobs"]["token_ids"][: len(ids)] == ids
        assert len(choice["logprobs"]["token_ids"]) == len(ids) + count


def test_ids_are_left_as_they_are_and_so_are_texts_on_request(ask):
    prompt = SENTENCE[:16]
    form = {"max_tokens": 10, "temperature": 0}
    by_ids = ask(prompt=TOKENIZER.encode(prompt), **form).json()["choices"][0]["text"]
    unhealed = ask(prompt=prompt, heal=False, **form).json()["choices"][0]["text"]
    assert by_ids == unhealed != ask(prompt=prompt, **form).json()["choices"][0]["text"]


def test_a_seed_gives_the_text_of_gpt_generate_to_each_of_several_choices(ask, model):
    how = {"temperature": 3.0, "top_k": 20}
    form = {"prompt": SENTENCE[:16], "max_tokens": 6, "seed": 4, "n": 3, **how}
    texts = [choice["text"] for choice in ask(**form).json()["choices"]]
    expected = ["", "", ""]
    sampling = Sampling(**how)
    options = {"max_new_tokens": 6, "seed": 4, "num_samples": 3, "sampling": sampling}
    for k, piece in stream_samples(model, TOKENIZER, SENTENCE[:16], **options):
        expected[k] += piece
    assert texts == expected
    assert len(set(texts)) > 1
