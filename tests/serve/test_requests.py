"""Prompts and their log-probabilities over HTTP, also of a prompt that ends inside a token."""

import pytest
import torch

from gpt.generation import stream_samples
from gpt.generation.sampling import Sampling
from gpt.serve.app import create_app
from tests.generation.memorised import SENTENCE, memorised, vocabulary
from tests.serve.server import choice_of, post, streamed

TOKENIZER = vocabulary(350)
GREEDY = {"max_tokens": 200, "temperature": 0}
HALF_A_WORD = "We'll see the fu"


@pytest.fixture(scope="module")
def model():
    return memorised(TOKENIZER)


@pytest.fixture
def ask(model):
    """Post a form to a new application, as each ends after its answer."""
    return lambda **form: post(create_app(model, TOKENIZER, name="tiny"), **form)


@pytest.mark.parametrize("prompt", ["W", HALF_A_WORD, "We'll see the "])
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
    read = logprobs["prompt_token_ids"]
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == len(TOKENIZER.encode(prompt))
    assert [id_ for id_ in read if id_ != TOKENIZER.eot] == ids[: len(ids) - usage["completion_tokens"]]
    # The page needs them, since they may be others than those of the typed text.
    first, *others = [piece["logprobs"] for piece in streamed(ask(**form, stream=True))]
    assert first["prompt_token_ids"] == read
    assert not any("prompt_token_ids" in piece for piece in others)


SCORED = TOKENIZER.encode("We'll see th")


@pytest.mark.parametrize("prompt", ["We'll see th", SCORED], ids=["text", "ids"])
@pytest.mark.parametrize("count", [0, 1])
def test_a_text_is_scored_as_by_a_forward_pass(ask, model, prompt, count):
    """What lm-evaluation-harness sends: echo, at most one token, one alternative."""
    response = ask(prompt=prompt, max_tokens=count, temperature=0, echo=True, logprobs=1)
    choice, length = choice_of(response), len(SCORED)
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("We'll see th") and choice["finish_reason"] == "length"
    assert logprobs["token_ids"][:length] == SCORED and len(logprobs["token_ids"]) == length + count
    usage = {"prompt_tokens": length, "completion_tokens": count, "total_tokens": length + count}
    assert response.json()["usage"] == usage
    with torch.no_grad():
        expected = model(torch.tensor([SCORED]))[0].log_softmax(-1)[range(length - 1), SCORED[1:]]
    first, *scores = logprobs["token_logprobs"]
    first_top, *tops = logprobs["top_logprobs"]
    assert first is None and first_top is None
    assert scores[: length - 1] == pytest.approx(expected.tolist(), abs=1e-4)
    for name, score, top in zip(logprobs["tokens"][1:], scores, tops, strict=True):
        assert top[name] == score <= max(top.values())


def test_prompts_have_their_choices_in_order(ask):
    choices = ask(prompt=["ab", "cd"], n=2, echo=True, max_tokens=6).json()["choices"]
    assert [choice["text"][:2] for choice in choices] == ["ab", "ab", "cd", "cd"]


def test_ids_are_left_as_they_are_and_so_are_texts_on_request(ask):
    def text(prompt, **options) -> str:
        return choice_of(ask(prompt=prompt, **GREEDY, **options))["text"]

    assert HALF_A_WORD + text(HALF_A_WORD) == SENTENCE
    by_ids = text(TOKENIZER.encode(HALF_A_WORD))
    assert by_ids == text(HALF_A_WORD, heal=False) != text(HALF_A_WORD)


def test_without_a_prompt_a_document_begins(ask):
    form = {"max_tokens": 4, "temperature": 0}
    texts = {choice_of(ask(**form, **prompt))["text"] for prompt in ({}, {"prompt": None}, {"prompt": ""})}
    assert len(texts) == 1
    assert ask(prompt=None, **form).json()["usage"]["prompt_tokens"] == 1  # `<|endoftext|>`


def test_a_top_k_of_zero_is_off(ask):
    form = {"prompt": HALF_A_WORD, "max_tokens": 6, "seed": 4, "temperature": 3.0}
    free, zero, one = (choice_of(ask(**form, **top))["text"] for top in ({}, {"top_k": 0}, {"top_k": 1}))
    assert zero == free != one


SAMPLING = [
    {"temperature": 3.0, "top_k": 20},
    {"temperature": 3.0, "top_p": 0.6},
    {"temperature": 5.0, "min_p": 0.02},
    {"temperature": 3.0, "repetition_penalty": 50.0},
]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_a_seed_gives_the_text_of_gpt_generate_to_each_of_several_choices(ask, model, sampling):
    form = {"prompt": HALF_A_WORD, "max_tokens": 6, "seed": 4, "n": 3}
    texts = [choice["text"] for choice in ask(**form, **sampling).json()["choices"]]
    expected = ["", "", ""]
    options = {"max_new_tokens": 6, "seed": 4, "num_samples": 3, "sampling": Sampling(**sampling)}
    for k, piece in stream_samples(model, TOKENIZER, HALF_A_WORD, **options):
        expected[k] += piece
    assert texts == expected
    assert len(set(texts)) > 1
