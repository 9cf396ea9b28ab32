"""Prompts that end inside a token, over HTTP."""

import pytest

from gpt.generation import stream_samples
from gpt.generation.sampling import Sampling
from gpt.serve.app import create_app
from tests.generation.memorised import SENTENCE, memorised, vocabulary
from tests.serve.server import choice_of, post, streamed

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
    response = ask(prompt=prompt, **GREEDY)
    assert prompt + choice_of(response)["text"] == SENTENCE
    assert response.json()["usage"]["prompt_tokens"] == len(TOKENIZER.encode(prompt))


def test_an_echo_has_the_tokens_of_its_text(ask, prompt):
    form = {"prompt": prompt, "echo": True, "logprobs": 1, **GREEDY}
    response = ask(**form)
    choice = choice_of(response)
    logprobs = choice["logprobs"]
    ids = logprobs["token_ids"]
    assert choice["text"] == SENTENCE
    assert ids == [*TOKENIZER.encode(SENTENCE), TOKENIZER.eot]
    for offset, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert SENTENCE.startswith(name, offset) or name.startswith(("bytes:", "<|"))
    assert all(score is None or score > -0.5 for score in logprobs["token_logprobs"])
    read = [id_ for id_ in logprobs["prompt_token_ids"] if id_ != TOKENIZER.eot]
    assert read == ids[: len(ids) - response.json()["usage"]["completion_tokens"]]


def test_the_first_piece_of_a_stream_has_the_prompts_tokens(ask, prompt):
    """The page needs them, since they may be others than those of the typed text."""
    form = {"prompt": prompt, "echo": True, "logprobs": 1, **GREEDY}
    expected = choice_of(ask(**form))["logprobs"]["prompt_token_ids"]
    first, *others = [piece["logprobs"] for piece in streamed(ask(**form, stream=True))]
    assert first["prompt_token_ids"] == expected
    assert not any("prompt_token_ids" in piece for piece in others)


@pytest.mark.parametrize("count", [0, 1])
def test_a_text_that_is_scored_has_the_tokens_that_it_has_alone(ask, count):
    ids = TOKENIZER.encode("We'll see th")
    choice = choice_of(ask(prompt="We'll see th", max_tokens=count, echo=True, logprobs=0))
    scored = choice["logprobs"]["token_ids"]
    assert scored[: len(ids)] == ids and len(scored) == len(ids) + count


def test_ids_are_left_as_they_are_and_so_are_texts_on_request(ask):
    def text(prompt, **options) -> str:
        return choice_of(ask(prompt=prompt, **GREEDY, **options))["text"]

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
