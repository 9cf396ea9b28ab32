# ruff: noqa: RUF001 - many scripts
"""The scripts of an exported file against the model, the tokenizer and the sampling of this package."""

import random
import re
from dataclasses import replace
from itertools import chain, islice, product

import numpy as np
import pytest
import torch

from gpt import GPTConfig, Tokenizer
from gpt.evaluation.copied import Copied
from gpt.generation import Sampling, stream_samples
from gpt.generation.healing import typed_prompt
from gpt.generation.sampling import sample_tokens, uniform
from gpt.generation.text import TextStream
from gpt.text.template import Template
from gpt.text.vocabulary import VocabularyToLearn, learn
from tests.generation.conftest import sharp
from tests.share.node import export, needs_node, run

pytestmark = needs_node

SMALL = GPTConfig(vocab_size=300, emb_dim=32, num_heads=4, num_layers=2, context_length=16)
ODD = {"emb_dim": 60, "num_heads": 3, "num_layers": 3, "context_length": 37}
MODELS = {
    "tied": ({}, "float32", 0, 2e-5),
    "untied, heads and width no multiple of 16": ({**ODD, "tie_embeddings": False}, "float32", 0, 2e-5),
    "no biases, exact GELU": ({"num_heads": 1, "qkv_bias": False, "exact_gelu": True}, "float32", 0, 2e-5),
    "float16": (ODD, "float16", 2e-4, 0.02),
    "int8": (ODD, "int8", 1.5e-3, 0.15),
}


@pytest.fixture
def exported(tmp_path):
    """Exports a model, and gives a function that runs the scripts of its file."""

    def make(model, *parts, **options):
        path = export(tmp_path / "it.html", model, *parts, **options)
        return lambda *asked: run(path, *asked)

    return make


def tied(vocab_size: int = 300, std: float = 0.3):
    """A small model."""
    return sharp(replace(SMALL, vocab_size=vocab_size), std=std)


def ids_of(choices: list[dict]) -> list[int]:
    return [id_ for choice in choices for id_ in choice["logprobs"]["token_ids"]]


def text_of(choices: list[dict]) -> str:
    return "".join(choice["text"] for choice in choices)


@pytest.mark.parametrize(("changes", "precision", "least", "most"), MODELS.values(), ids=MODELS)
def test_logits_are_the_models_and_lower_precision_makes_a_smaller_file(
    changes, precision, least, most, exported, tmp_path
):
    """The logits differ relative to theirs by something between `least` and `most`."""
    config = replace(SMALL, **changes)
    model = sharp(config, std=0.15)
    tokens = torch.randint(0, 300, (config.context_length,))
    (logits,) = exported(model, precision=precision)(["logits", tokens.tolist()])
    with torch.no_grad():
        expected = model(tokens[None])[0]
    difference = torch.tensor(logits) - expected
    assert least <= difference.std() / expected.std() < most
    assert difference.abs().max() < 5 * most
    blocks = sum(map(len, re.findall(r'"block\d+">(.*?)<', (tmp_path / "it.html").read_text("utf-8"))))
    weights = sum(weight.numel() for weight in model.parameters()) * 4 / 3  # in base64
    width = {"float32": 4, "float16": 2, "int8": 1}[precision]
    assert 0.8 < blocks / (weights * width) < 1.3


ALPHABETS = [
    "etaoin shrdlu",
    " \t\n\r\v\f\x1c\x85\xa0\u2003\u2028\u3000\ufeff\u180e\u200b",
    "'sdmtlvre ",
    "0123456789٣½²Ⅷ ",
    "中文字符，。の かな한글",
    "العربية وَلَدٌ हिन्दी ภาษาไทย",
    "👍🏽👩‍👩‍👧🇩🇪é\u0301ẞ",
    "".join(map(chr, range(33))) + "\x7f\x9f",
    "<|endoftext|></script><!--",
]


def strings(count: int) -> list[str]:
    """Texts of words, blanks, digits, emoji, several scripts, control characters, any characters."""
    drawn = random.Random(1)

    def part() -> str:
        letters = [drawn.choice(drawn.choice(ALPHABETS)) for _ in range(drawn.randrange(1, 9))]
        code = drawn.choice((drawn.randrange(0xD800), drawn.randrange(0xE000, 0x110000)))
        return "".join(letters) + (chr(code) if drawn.random() < 0.3 else " ")

    return ["".join(part() for _ in range(drawn.randrange(1, 6))) for _ in range(count)]


LETTERS = "हिन्दी में लिखा हुआ पाठ और 한글 ありがとう the quick brown fox, it's 1234 words. " * 40
VOCABULARIES = {
    "gpt2": Tokenizer,
    "a prefix": lambda: Tokenizer(vocab_size=1000),
    "learned": lambda: learn([LETTERS], VocabularyToLearn(n_vocab=320)),
}


@pytest.fixture(scope="module", params=VOCABULARIES.values(), ids=VOCABULARIES)
def tokenizer(request) -> Tokenizer:
    return request.param()


@pytest.fixture
def asked(tokenizer, exported):
    """Asks the scripts of a file with the vocabulary and a model of no use."""
    useless = replace(SMALL, vocab_size=tokenizer.n_vocab, emb_dim=2, num_heads=1, num_layers=1)
    return exported(sharp(useless), tokenizer)


def test_ids_are_the_tokenizers(tokenizer, asked):
    texts = [*strings(5_000), "", "a" * 3000]
    (ids,) = asked(["encode", texts])
    assert ids == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("word", ["a" * 20_000, "ab" * 10_000])
def test_a_long_word_has_its_ids_soon(word, exported):
    """A merge changes only the pairs beside it. 4,000 letters took five seconds."""
    tokenizer = VOCABULARIES["a prefix"]()
    ask = exported(tied(tokenizer.n_vocab), tokenizer)
    (ids, seconds) = ask(["timed", "encode", word])[0]
    assert ids == tokenizer.encode(word)
    assert seconds < 10


def test_a_token_has_the_name_that_the_server_gives_it(exported):
    """U+FFFD itself is a character, and no sign of half a character."""
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from gpt.generation import Token
    from gpt.serve.requests import log_probabilities

    table = [bytes([byte]) for byte in range(256)] + [b"\xef\xbf", "\ufffd".encode(), "\ufeff".encode()]
    tokenizer = Tokenizer("own", table=table)
    ids = [*range(tokenizer.n_vocab)]
    tokens = [Token(None, id_, "", None, None, False) for id_ in ids]
    ask = exported(tied(tokenizer.n_vocab), tokenizer)
    assert ask(*(["name", id_] for id_ in ids)) == log_probabilities(tokenizer, tokens, 0)["tokens"]
    (seen,) = ask(["attention", {"prompt": ids[-4:], "tokens": []}])
    assert seen["tokens"] == ["\ufffd", "\ufffd", "\ufeff", "<|endoftext|>"]


ENDS = [
    "The ", "The", "we'l", "'", "x = foo(b", "def f():\n    ", "a\n\n", "it  ", "methodo", " ", "\n", "日本",
    "ab" * 90,
]  # fmt: skip


def test_the_tokens_of_a_prompts_last_word_are_the_engines(tokenizer, asked):
    texts = [*ENDS, *strings(100), "", LETTERS]
    (counts,) = asked(["healed", texts])
    assert counts == [typed_prompt(tokenizer, text).healed for text in texts]


def test_typed_prompts_are_continued_as_gpt_generate_does(exported):
    tokenizer = VOCABULARIES["learned"]()
    model = tied(tokenizer.n_vocab, std=0.15)
    prompts = ["the quick br", "the quick ", "it's 12", "क", "quick brown fox, it's 1234 words. it", "q"]
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.2, "top_k": 40},
        {"repetition_penalty": 1.5, "top_p": 0.9},
    ]
    forms, expected = [], []
    seeds = [(0, False), (1, True), (2, False), (3, True)]
    for prompt, sampling, (seed, echo) in product(prompts, settings, seeds):
        forms.append({"prompt": prompt, "max_tokens": 20, "seed": seed, "echo": echo, **sampling})
        how = {"max_new_tokens": 20, "seed": seed, "sampling": Sampling(**sampling)}
        pieces = stream_samples(model, tokenizer, prompt, **how)
        expected.append((prompt if echo else "") + "".join(text for _, text in pieces))
    answers = exported(model, tokenizer)(*(["text", form] for form in forms))
    wrong = sum(text_of(choices) != text for choices, text in zip(answers, expected, strict=True))
    assert wrong <= 1  # sums of float32 and of double meet at an edge


def test_halves_of_surrogate_pairs_are_refused(exported):
    texts = ("a\ud83d b", "\udc4d", "\udc4d\ud83d!", "👍")
    *refused, whole = exported(tied(257))(*(["broken", "ids", {"prompt": text}] for text in texts))
    assert whole is None and all("half a character" in message for message in refused)


def test_pieces_of_text_are_whole_characters_and_end_before_a_stop_string(exported):
    tokenizer = Tokenizer(vocab_size=257)
    asked, expected = [], []
    texts = ["naïve 👍 END more", "ENENEND", "EN", "\ufeffy\ufeff", "END"]
    for text, stop in product(texts, ["END", "👍", None]):
        ids = [*tokenizer.encode(text), 240, 159, tokenizer.eot]  # half a character at the end
        stream = TextStream(tokenizer, [stop] if stop else [])
        asked.append(["pieces", ids, stop])
        expected.append([*map(stream.feed, ids), stream.close()])
    assert exported(tied(257))(*asked) == expected


SETTINGS = [
    {"temperature": 0},
    {"temperature": 1e-20},
    {"temperature": 1.5, "top_k": 5},
    {"top_p": 0.6, "top_k": 20},
    {"top_p": 0},
    {"min_p": 0.1, "top_p": 0.95, "temperature": 1.3},
    {"repetition_penalty": 1.8, "temperature": 0.9, "top_k": 1000},
]


def test_draws_are_the_engines(exported):
    logits = torch.randn(300) * 3
    logits[[5, 6, 7]] = logits.max() - 1  # ties
    seen = [5, 100, 100, int(logits.argmax())]
    numbers = [*torch.rand(400, dtype=torch.float64).tolist(), 0.0, 1 - 2**-24]
    draws = exported(tied())(*(["draws", logits.tolist(), how, seen, numbers] for how in SETTINGS))
    rows = logits.expand(len(numbers), -1)
    came_before = torch.zeros_like(rows, dtype=torch.bool)
    came_before[:, seen] = True
    for how, drawn in zip(SETTINGS, draws, strict=True):
        expected = sample_tokens(rows, Sampling(**how), came_before, torch.tensor(numbers))
        assert (torch.tensor(drawn) != expected).sum() <= 1, how  # float32 and double meet at an edge


def test_a_seed_has_the_numbers_of_gpt_generate_and_they_are_uniform(exported):
    seeds = [0, 1, -1, 2**40, -(2**33) - 7]
    numbers = exported(tied())(*(["numbers", seed, 4000] for seed in seeds))
    assert numbers == [list(islice(uniform(seed, 0), 4000)) for seed in seeds]
    drawn = torch.tensor([*numbers, list(islice(uniform(0, 1), 4000))])
    assert drawn.min() >= 0 and drawn.max() < 1 and abs(drawn.var() - 1 / 12) < 0.01
    shifted = torch.cat([drawn[:, 1:], drawn[:, :-1]])  # seeds, a second sample, and their next numbers
    assert (torch.corrcoef(shifted) - torch.eye(12)).abs().max() < 0.08


def test_requests_are_answered_as_the_server_does(exported):
    """Texts, log-probabilities and attention, with and without the prompt's, past the context."""
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from tests.serve.server import MODEL, TOKENIZER, new_app, talk

    forms = [
        {"prompt": "Hello you", "max_tokens": 90},
        {"prompt": "Hello " * 20, "max_tokens": 9, "echo": True},
        {"prompt": "", "max_tokens": 5},
        {"prompt": TOKENIZER.encode("ids"), "max_tokens": 40, "repetition_penalty": 1.3},
        {"prompt": "Hello", "max_tokens": 60, "temperature": 0.8, "top_k": 50, "seed": 7},
    ]
    forms = [{"temperature": 0, **form, "logprobs": 5} for form in forms]
    look = {"prompt": "Hello", "tokens": [5, 6]}

    async def use(client):
        answers = [(await client.post("/v1/completions", json=form)).json() for form in forms]
        return answers, (await client.post("/attention", json=look)).json()

    answers, attention = talk(new_app(), use)
    *texts, seen = exported(MODEL, TOKENIZER)(*(["text", form] for form in forms), ["attention", look])
    for answer, choices in zip(answers, texts, strict=True):
        (expected,) = answer["choices"]
        assert text_of(choices) == expected["text"]
        assert choices[-1]["finish_reason"] == expected["finish_reason"]
        assert ids_of(choices) == expected["logprobs"]["token_ids"]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            values = [value for choice in choices for value in choice["logprobs"][name]]
            for ours, theirs in zip(values, expected["logprobs"][name], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4)
    assert seen["tokens"] == attention["tokens"]
    np.testing.assert_allclose(seen["weights"], attention["weights"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("seed", [2**53 + 1, "9007199254740993", "one", 0.5])
def test_a_seed_that_javascript_cannot_hold_is_refused(exported, seed):
    (message,) = exported(tied())(["broken", "complete", {"prompt": "", "max_tokens": 1, "seed": seed}])
    got = 2**53 if seed == 2**53 + 1 else seed
    assert message == f"the seed must be a whole number of at most 53 bits, got {got}"


def test_a_conversation_is_the_templates(exported):
    template = Template(system="S{content}\n", user="U {content}$&\n", assistant="A: {content}")
    tokenizer = Tokenizer(vocab_size=300)
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": f"{role} <|endoftext|> {{content}}"} for role in roles]
    (ids,) = exported(tied(), tokenizer, template)(["ids", {"messages": messages}])
    assert ids == template.prompt(tokenizer, messages)


def test_attention_in_the_middle_of_a_text_leaves_the_text_as_it_is(exported):
    """A look back at a token of the text, at another text and at another model, between two tokens."""
    form = {"prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0}
    alone, together = exported(tied())(["text", form], ["interrupted", form])
    assert len(together) == len(alone) == 40
    assert (ids_of(together), text_of(together)) == (ids_of(alone), text_of(alone))


def test_copied_runs_are_those_of_the_server(exported):
    """Also where the text has the beginning in one place and the end in another."""
    drawn = random.Random(3)
    first = 0xD7F0  # ids on both sides of the surrogates, which are no letters
    around = [*range(first, first + 40)]
    joined = [*range(12), 99, *range(1, 13)]
    blocks = [[drawn.randrange(9) for _ in range(15)] for _ in range(4)]
    asked = [[*range(13)], around[3:30], *([*chain(*drawn.choices(blocks, k=5))] for _ in range(9))]
    for ids in (around, joined, [*chain(*drawn.choices(blocks, k=20))]):
        text = np.array(ids, np.uint16)
        copied = Copied(text, Tokenizer(vocab_size=300))
        found = exported(tied(), text=text)(*(["copied", {"tokens": tokens}] for tokens in asked))
        assert found == [{"runs": copied.runs(tokens)} for tokens in asked]
        assert any(run["runs"] for run in found)
    assert len(copied.runs(asked[2])) > 1
