"""Prompts that end inside a token, over HTTP."""

import pytest

from gpt.generation import stream_samples
from gpt.generation.sampling import Sampling
from gpt.serve.app import create_app
from tests.generation.memorised import SENTENCE, memorised, vocabulary
from tests.serve.server import post, streamed

TOKENIZER = vocabulary(350)
GREEDY = {"max_tokens": 200, "temperature": 0}


@pytest.fixture(scope="module")
def model():
    return memorised(TOKENIZER)


@pytest.fixture
def ask(model):
    """Post a form to a new application, as each ends after its answer."""
    return lambda **form: post(create_app(model, TOKENIZER, name="tiny"), **form)


@pytest.fixture(params=["W", "We'll see the fu", "We'll see the "], ids=["a letter", "in a word", "a blank"])
def prompt(request) -> str:
    return request.param


def test_a_prompt_is_continued_by_the_rest_of_the_sentence(ask, prompt):
    body = ask(prompt=prompt, **GREEDY).json()
    assert prompt + body["choices"][0]["text"] == SENTENCE
    assert body["usage"]["prompt_tokens"] == len(TOKENIZER.encode(prompt))
    pieces = streamed(ask(prompt=prompt, **GREEDY, stream=True))
    assert prompt + "".join(piece["text"] for piece in pieces) == SENTENCE


def test_an_echo_has_the_tokens_of_its_text(ask, prompt):
    form = {"prompt": prompt, "echo": True, "logprobs": 1, **GREEDY}
    body = ask(**form).json()
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    ids = logprobs["token_ids"]
    assert choice["text"] == SENTENCE
    assert ids == [*TOKENIZER.encode(SENTENCE), TOKENIZER.eot]
    for offset, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert SENTENCE.startswith(name, offset) or name.startswith(("bytes:", "<|"))
    assert all(score is None or score > -0.5 for score in logprobs["token_logprobs"])
    read = [id_ for id_ in logprobs["prompt_token_ids"] if id_ != TOKENIZER.eot]
    assert read == ids[: len(ids) - body["usage"]["completion_tokens"]]
    first, *others = [piece["logprobs"] for piece in streamed(ask(**form, stream=True))]
    assert [id_ for piece in (first, *others) for id_ in piece["token_ids"]] == ids
    assert first["prompt_token_ids"] == logprobs["prompt_token_ids"]
    assert not any("prompt_token_ids" in piece for piece in others)


@pytest.mark.parametrize("count", [0, 1])
def test_a_text_that_is_scored_has_the_tokens_that_it_has_alone(ask, count):
    ids = TOKENIZER.encode("We'll see th")
    (choice,) = ask(prompt="We'll see th", max_tokens=count, echo=True, logprobs=0).json()["choices"]
    assert choice["logprobs"]["token_ids"][: len(ids)] == ids
    assert len(choice["logprobs"]["token_ids"]) == len(ids) + count


def test_ids_are_left_as_they_are_and_so_are_texts_on_request(ask):
    def text(prompt, **options) -> str:
        return ask(prompt=prompt, **GREEDY, **options).json()["choices"][0]["text"]

    by_ids = text(TOKENIZER.encode("We'll see the fu"))
    assert by_ids == text("We'll see the fu", heal=False) != text("We'll see the fu")


SAMPLING = [
    {"temperature": 3.0, "top_k": 20},
    {"temperature": 3.0, "top_p": 0.6},
    {"temperature": 5.0, "min_p": 0.02},
    {"temperature": 3.0, "repetition_penalty": 50.0},
]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_a_seed_gives_the_text_of_gpt_generate_to_each_of_several_choices(ask, model, sampling):
    form = {"prompt": "We'll see the fu", "max_tokens": 6, "seed": 4, "n": 3}
    texts = [choice["text"] for choice in ask(**form, **sampling).json()["choices"]]
    expected = ["", "", ""]
    options = {"max_new_tokens": 6, "seed": 4, "num_samples": 3, "sampling": Sampling(**sampling)}
    for k, piece in stream_samples(model, TOKENIZER, "We'll see the fu", **options):
        expected[k] += piece
    assert texts == expected
    assert len(set(texts)) > 1
