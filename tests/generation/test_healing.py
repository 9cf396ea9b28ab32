"""A typed prompt that ends inside a token is continued as if it did not."""

from collections.abc import Sequence

import pytest
import torch

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.errors import InputError
from gpt.generation import Engine, Request, Sampling, stream_samples
from gpt.generation.healing import typed_prompt
from gpt.text.tokenizer import last_word
from tests.generation.conftest import sharp, slow_greedy
from tests.generation.memorised import SENTENCE, memorised, vocabulary

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def learned() -> tuple[GPT, Tokenizer]:
    """A model that knows the sentence, in a vocabulary of the sentence's text."""
    tokenizer = vocabulary(350)
    return memorised(tokenizer), tokenizer


def typed(tokenizer: Tokenizer, prompt: str, **settings) -> Request:
    """A request for the likeliest text after a typed prompt."""
    ids, healed = typed_prompt(tokenizer, prompt)
    defaults = {"max_new_tokens": 300, "sampling": GREEDY, "end": tokenizer.eot}
    return Request(tokens=ids, healed=healed, **defaults | settings)


def continued(model: GPT, tokenizer: Tokenizer, prompts: Sequence[str], **settings) -> list[str]:
    """The texts that follow prompts, all of them decoded together."""
    engine = Engine(model, tokenizer)
    texts = {}
    for prompt in prompts:
        texts |= dict.fromkeys(engine.add(typed(tokenizer, prompt, **settings)), "")
    for token in engine.run():
        texts[token.sample] += token.text
    return list(texts.values())


@pytest.mark.parametrize("size", [420, 2048, pytest.param(50257, marks=pytest.mark.slow)])
def test_every_prefix_of_a_memorised_sentence_is_continued_by_its_rest(size):
    tokenizer = vocabulary(size)
    prompts = [SENTENCE[:end] for end in range(len(SENTENCE))]
    texts = continued(memorised(tokenizer), tokenizer, prompts)
    assert texts == [SENTENCE.removeprefix(prompt) for prompt in prompts]


@pytest.mark.parametrize("prompt", ["I was retu", "retu", "we'l", "x  "])
def test_each_way_to_cut_the_word_is_as_likely_as_its_draws(prompt):
    """The shares of samples against those of all ways, found by trying every token at each place."""
    tokenizer = vocabulary(400)
    model = sharp(
        GPTConfig(vocab_size=400, context_length=32, emb_dim=16, num_heads=1, num_layers=1), std=0.2
    )
    count = 2000
    request = typed(tokenizer, prompt, max_new_tokens=1, samples=count, seed=1, sampling=Sampling(), end=None)
    kept = request.tokens[: len(request.tokens) - request.healed]
    first = kept or [tokenizer.eot]

    def shares(ids: list[int], rest: bytes, share: float) -> dict[tuple[int, ...], float]:
        if not rest:
            return {tuple(ids): share}
        with torch.no_grad():
            weights = model(torch.tensor([[*first, *ids]]))[0, -1].exp().tolist()
        fitting = [
            id_ for id_, token in enumerate(tokenizer.tokens) if token[: len(rest)] == rest[: len(token)]
        ]
        total = sum(weights[id_] for id_ in fitting)
        found = {}
        for id_ in fitting:
            left = rest[len(tokenizer.tokens[id_]) :]
            found |= shares([*ids, id_], left, share * weights[id_] / total)
        return found

    expected = shares([], tokenizer.decode_bytes(request.tokens[len(kept) :]), 1.0)
    assert len(expected) > 3 and sum(expected.values()) == pytest.approx(1)
    engine = Engine(model, tokenizer)
    samples = engine.add(request)
    list(engine.run())
    drawn = [tuple(sample.tokens[len(first) :]) for sample in samples]
    for ids, share in expected.items():
        frequency = sum(row[: len(ids)] == ids for row in drawn) / count
        assert frequency == pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5 + 1e-9)


@pytest.mark.parametrize(
    ("text", "word"), [("we'l", "'l"), ("\"'l", "l"), (" 'l", "l"), ("x = (", " ("), ("a\n ", "\n ")]
)
def test_the_last_word_is_what_may_change(text, word):
    assert last_word(text) == word


def test_an_engine_without_a_tokenizer_refuses_to_heal(learned):
    model, tokenizer = learned
    with pytest.raises(InputError, match="with a tokenizer"):
        Engine(model).add(typed(tokenizer, "We"))


def test_stop_strings_count_in_what_is_new_alone(learned):
    assert continued(*learned, ["We'll see the func"], stop=["tional"]) == [""]
    assert continued(*learned, ["We'll see the func"], stop=["func", "method"]) == ["tional "]


@pytest.mark.parametrize("context", [1, 16])
def test_past_the_context_the_window_moves_in_the_word_too(context, learned):
    """What follows the word is what the model writes after these tokens, read again."""
    _, tokenizer = learned
    model = sharp(GPTConfig(vocab_size=350, context_length=context, emb_dim=16, num_heads=2, num_layers=1))
    engine, samples = Engine(model, tokenizer, chunk=7), []
    for end in range(1, len(SENTENCE) * 2, 3):
        how = {"max_new_tokens": 6, "samples": 2, "end": None}
        prompt = (SENTENCE * 2)[:end]
        samples += engine.add(typed(tokenizer, prompt, **how))
        samples += engine.add(typed(tokenizer, prompt, echo=True, alternatives=1, **how))
    list(engine.run())
    for sample in samples:
        known = sample.prompt_length + 1
        assert sample.tokens == slow_greedy(model, sample.tokens[:known], 5)


def test_ids_are_left_as_they_are_unless_their_tokenizer_is_given(learned):
    model, tokenizer = learned
    prompt = tokenizer.encode("We'll see the func")
    how = {"max_new_tokens": 5, "temperature": 0}
    (left,) = generate(model, [prompt], **how)
    assert left[: len(prompt)] == prompt
    (healed,) = generate(model, [prompt], heal=tokenizer, **how)
    assert tokenizer.decode(healed).startswith("We'll see the functional")
    (word,) = generate(model, [tokenizer.encode("We'")], heal=tokenizer, **how)
    assert SENTENCE.startswith(tokenizer.decode(word))  # without an added token
    documents = [[tokenizer.eot, *prompt], [tokenizer.eot, *tokenizer.encode("W")]]
    for row in generate(model, documents, heal=tokenizer, **how):
        assert row[0] == tokenizer.eot and SENTENCE.startswith(tokenizer.decode(row[1:]))
    with pytest.raises(InputError, match="lists"):
        generate(model, torch.tensor([prompt]), heal=tokenizer, **how)


def test_a_typed_text_is_healed_unless_it_is_not_wanted(learned):
    """`--prompt 'the '`: training never saw a space as a token there."""
    model, tokenizer = learned
    prompt, how = "We'll see the ", {"max_new_tokens": 300, "sampling": GREEDY}

    def text(given: str | list[int], **options) -> str:
        return "".join(piece for _, piece in stream_samples(model, tokenizer, given, **how, **options))

    assert prompt + text(prompt) == SENTENCE
    assert text(prompt, heal=False) == text(tokenizer.encode(prompt)) != text(prompt)


@pytest.mark.parametrize("prompt", ["We", "return"])
def test_a_prompt_of_one_word_is_echoed_whole_and_without_an_added_token(learned, prompt):
    model, tokenizer = learned
    engine = Engine(model, tokenizer)
    engine.add(typed(tokenizer, prompt, echo=True, max_new_tokens=0))
    tokens = list(engine.run())
    assert [token.id for token in tokens] == tokenizer.encode(prompt)
    assert "".join(token.text for token in tokens) == prompt and tokens[-1].finished == "length"
