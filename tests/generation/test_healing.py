"""A typed prompt that ends inside a token is continued as if it did not."""

from collections.abc import Sequence

import pytest
import torch

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.errors import InputError
from gpt.generation import Engine, Request, Sampling, stream_samples
from gpt.generation.healing import typed_prompt
from gpt.text.tokenizer import last_word
from gpt.text.vocabulary import Learned, learn
from tests.generation.conftest import sharp, slow_greedy

GREEDY = Sampling(temperature=0)
SENTENCE = (
    "We'll see the functional methodology:\n\n    return naïve 3.14 日本語 unhappily, they'd said; it's over"
)
# Many neighbours of the sentence's words, so that learned vocabularies have tokens that cut them elsewhere.
TEXT = " ".join(
    [
        SENTENCE,
        "function functions unction method methodical odology hap happy unhappy happily ill will'll well",
        "see seen these there they then retur turn turned urn over cover overt said aid sail I'd they've",
        "the theme thematic other logy logic local national nation 日本 日本人 本語 31 314 14 naive caf café",
    ]
    * 3
)


def vocabulary(size: int) -> Tokenizer:
    if size > 50000:
        return Tokenizer()
    if size > 2000:  # as many tokens as that has no short text
        return Tokenizer("gpt2", vocab_size=size)
    return learn([TEXT], Learned(size))


def memorised(tokenizer: Tokenizer, sentence: str, context_length: int = 512) -> GPT:
    """A model that has memorised a sentence, at the beginning of a document and of a window."""
    torch.manual_seed(0)
    ids = [tokenizer.eot, *tokenizer.encode(sentence), tokenizer.eot]
    size = {"emb_dim": 32, "num_heads": 1, "num_layers": 1, "context_length": context_length}
    model = GPT(GPTConfig(vocab_size=tokenizer.n_vocab, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
    for _ in range(400):
        loss = torch.zeros(())
        for text in (torch.tensor(ids), torch.tensor(ids[1:])):
            loss = loss + torch.nn.functional.cross_entropy(model(text[None, :-1])[0], text[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.02:
            break
    assert loss.item() < 0.05
    return model.eval()


@pytest.fixture(scope="module")
def learned() -> tuple[GPT, Tokenizer]:
    """A model that knows the sentence, in a vocabulary of the sentence's text."""
    tokenizer = vocabulary(350)
    return memorised(tokenizer, SENTENCE), tokenizer


def continued(model: GPT, tokenizer: Tokenizer, prompts: Sequence[str], **settings) -> list[str]:
    """The texts that follow prompts, all of them decoded together."""
    engine = Engine(model, tokenizer)
    how = {"max_new_tokens": 300, "sampling": GREEDY, "end": tokenizer.eot, **settings}
    texts = {}
    for prompt in prompts:
        ids, ending = typed_prompt(tokenizer, prompt)
        texts |= dict.fromkeys(engine.add(Request(tokens=ids, ending=ending, **how)), "")
    for token in engine.run():
        texts[token.sample] += token.text
    return list(texts.values())


def prefixes(text: str) -> list[str]:
    return [text[:end] for end in range(len(text))]


@pytest.mark.parametrize("size", [300, 420, 2048, pytest.param(50257, marks=pytest.mark.slow)])
def test_every_prefix_of_a_memorised_sentence_is_continued_by_its_rest(size):
    tokenizer = vocabulary(size)
    model = memorised(tokenizer, SENTENCE)
    texts = continued(model, tokenizer, prefixes(SENTENCE))
    assert texts == [SENTENCE[len(prompt) :] for prompt in prefixes(SENTENCE)]


def test_what_is_typed_ends_as_the_text_would_with_a_space_or_without(learned):
    """`--prompt 'the '`, whose last token would be a space that training never saw there."""
    model, tokenizer = learned
    begin = SENTENCE[: SENTENCE.index("functional")]
    for prompt in (begin, begin[:-1], f"{begin}func"):
        pieces = stream_samples(model, tokenizer, prompt, max_new_tokens=300, sampling=GREEDY)
        assert prompt + "".join(text for _, text in pieces) == SENTENCE


def test_each_way_is_as_likely_as_the_model_finds_its_tokens():
    """The shares of samples against the model's probabilities of all ways."""
    tokenizer = Tokenizer("gpt2", vocab_size=2048)
    config = GPTConfig(vocab_size=2048, context_length=32, emb_dim=16, num_heads=1, num_layers=1)
    model = sharp(config, std=0.2)
    prompt = "I was retu"
    ids, ending = typed_prompt(tokenizer, prompt)
    expected: dict[tuple[int, ...], float] = {}
    assert ending and len(ending.ways) > 1
    for way in ending.ways:
        read = torch.tensor([[*ids, *way.before]])
        with torch.no_grad():
            logits = model(read)[0, :, : tokenizer.n_vocab].log_softmax(-1)
        common = sum(logits[len(ids) - 1 + k, id_].item() for k, id_ in enumerate(way.before))
        for id_ in way.ids:
            key = (*way.before, id_)
            expected[key] = common + logits[-1, id_].item()
    shares = torch.tensor([*expected.values()]).softmax(0)
    engine = Engine(model, tokenizer)
    count = 4000
    samples = engine.add(Request(tokens=ids, ending=ending, max_new_tokens=1, samples=count, seed=1))
    for _ in engine.run():
        pass
    drawn = [tuple(sample.tokens[len(ids) :]) for sample in samples]
    for way, share in zip(expected, shares.tolist(), strict=True):
        found = sum(one[: len(way)] == way for one in drawn) / count
        assert found == pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5 + 1e-9)


@pytest.mark.parametrize("prompt", ["the metho", "we'l", "it's ", "f():\n   ", "f(\n", "a\n\n", "W"])
def test_the_ways_are_those_that_the_tokenizer_gives_for_some_text(prompt):
    tokenizer = Tokenizer("gpt2", vocab_size=2048)
    ids, ending = typed_prompt(tokenizer, prompt)
    assert ending
    kept = [] if ending.is_all else ids
    for way in ending.ways:
        for id_ in way.ids:
            spelled = [*kept, *way.before, id_]
            data = tokenizer.decode_bytes(spelled)
            assert data.startswith(prompt.encode())
            text = data.decode(errors="ignore")
            # Blanks are cut by what follows: a letter, a blank or nothing.
            cuts = [tokenizer.encode(text + more)[: len(spelled)] for more in ("", "x", " x", "\n")]
            assert spelled in cuts or len(text.encode()) < len(data)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("The functio", " functio"), ("The ", " "), ("a\n\n  ", "\n\n  "), ("f():\n", "\n"), ("we'l", "'l"),
        ('"\'l', "l"), (" 'l", "l"), ("3.14", "14"), ("x = (", " ("), ("", ""), ("é日本", "é日本"),
        ("'", "'"),
    ],
)  # fmt: skip
def test_the_last_word_is_what_may_change(text, word):
    assert last_word(text) == word


def test_seeds_sample_numbers_and_company_change_nothing(learned):
    model, tokenizer = learned
    prompts = ["We'll see the func", "We'll s", "We'll see the ", "functional"]

    def texts(some: list[str], **settings) -> list[str]:
        return continued(model, tokenizer, some, sampling=Sampling(temperature=2.0), seed=5, **settings)

    alone = [texts([prompt], max_new_tokens=9)[0] for prompt in prompts]
    assert texts(prompts, max_new_tokens=9) == alone
    assert texts(prompts[:1], samples=7, max_new_tokens=9)[:3] == texts(
        prompts[:1], samples=3, max_new_tokens=9
    )
    assert texts(prompts[:1], samples=3, max_new_tokens=9)[0] == alone[0]


def test_a_stream_goes_on_from_wherever_it_was_cut(learned):
    model, tokenizer = learned
    pieces = [text for _, text in stream_samples(model, tokenizer, "We", max_new_tokens=300, sampling=GREEDY)]
    assert "We" + "".join(pieces) == SENTENCE
    cuts = ["We" + "".join(pieces[:count]) for count in range(len(pieces))]
    assert [cut + text for cut, text in zip(cuts, continued(model, tokenizer, cuts), strict=True)] == [
        SENTENCE
    ] * len(cuts)


def test_stop_strings_count_in_what_is_new_alone(learned):
    model, tokenizer = learned
    assert continued(model, tokenizer, ["We'll see the func"], stop=["tional"]) == [""]
    assert continued(model, tokenizer, ["We'll see the func"], stop=["func", "method"]) == ["tional "]


@pytest.mark.parametrize("prompt", ["W", "We'll see the func", "We'll see the functional ", "We'll"])
def test_an_echo_is_the_prompt_and_its_tokens_make_the_text(learned, prompt):
    model, tokenizer = learned
    ids, ending = typed_prompt(tokenizer, prompt)
    engine = Engine(model, tokenizer)
    how = {"max_new_tokens": 300, "sampling": GREEDY, "end": tokenizer.eot, "echo": True, "alternatives": 0}
    engine.add(Request(tokens=ids, ending=ending, **how))
    tokens = list(engine.run())
    assert "".join(token.text for token in tokens) == SENTENCE
    spelled = [token.id for token in tokens]
    assert spelled == [*tokenizer.encode(SENTENCE), tokenizer.eot]
    read = torch.tensor([tokens[0].sample.tokens])
    with torch.no_grad():
        expected = model(read)[0].log_softmax(-1)
    first = read.shape[1] - len(tokens)  # `<|endoftext|>` precedes a prompt that is taken back as a whole
    for place, token in enumerate(tokens, first):
        if place == 0:
            assert token.log_probability is None
        else:
            assert token.log_probability == pytest.approx(expected[place - 1, token.id].item(), abs=1e-3)


@pytest.mark.parametrize("context", [1, 5, 16, 64])
def test_past_the_context_the_window_leaves_room_for_the_word(context, learned):
    """What follows the word is what the model writes after these tokens, read again."""
    _, tokenizer = learned
    model = sharp(GPTConfig(vocab_size=350, context_length=context, emb_dim=16, num_heads=2, num_layers=1))
    engine = Engine(model, tokenizer, chunk=7)
    for end in range(1, len(SENTENCE) * 2, 3):
        ids, ending = typed_prompt(tokenizer, (SENTENCE * 2)[:end])
        how = {"max_new_tokens": 6, "sampling": GREEDY, "samples": 2}
        engine.add(Request(tokens=ids, ending=ending, **how))
        engine.add(Request(tokens=ids, ending=ending, echo=True, alternatives=1, **how))
    samples = {token.sample for token in engine.run()}
    assert len(samples) == 4 * len(range(1, len(SENTENCE) * 2, 3))
    for sample in samples:
        known = sample.prompt_length + 1
        assert sample.tokens[known:] == slow_greedy(model, sample.tokens[:known], 5)[known:]


def test_ids_are_left_as_they_are_unless_their_tokenizer_is_given(learned):
    model, tokenizer = learned
    prompt = tokenizer.encode("We'll see the func")
    (left,) = generate(model, [prompt], max_new_tokens=5, temperature=0)
    assert left[: len(prompt)] == prompt
    (healed,) = generate(model, [prompt], max_new_tokens=5, temperature=0, heal=tokenizer)
    assert tokenizer.decode(healed).startswith("We'll see the functional")
    documents = [[tokenizer.eot, *prompt], [tokenizer.eot, *tokenizer.encode("W")]]
    for row in generate(model, documents, max_new_tokens=5, temperature=0, heal=tokenizer):
        assert row[0] == tokenizer.eot and SENTENCE.startswith(tokenizer.decode(row[1:]))
    with pytest.raises(InputError, match="lists"):
        generate(model, torch.tensor([prompt]), max_new_tokens=5, heal=tokenizer)
    ids = stream_samples(model, tokenizer, prompt, max_new_tokens=5, sampling=GREEDY)
    text = stream_samples(
        model, tokenizer, "We'll see the func", heal=False, max_new_tokens=5, sampling=GREEDY
    )
    assert list(ids) == list(text)
