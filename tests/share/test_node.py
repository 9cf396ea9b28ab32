# ruff: noqa: RUF001 - many scripts
"""The scripts of an exported file against the model, the tokenizer and the sampling of this package."""

import random
from itertools import islice

import numpy as np
import pytest
import torch

from gpt import GPTConfig, Tokenizer
from gpt.generation import Sampling, stream_samples
from gpt.generation.healing import typed_prompt
from gpt.generation.sampling import sample_tokens, uniform
from gpt.generation.text import TextStream
from gpt.text.template import Template
from gpt.text.vocabulary import Learned, learn
from tests.generation.conftest import sharp, slow_greedy
from tests.share.node import export, needs_node, run

pytestmark = needs_node

SHAPES = {
    "tied": {"emb_dim": 32, "num_heads": 4, "num_layers": 2, "context_length": 16},
    "untied, heads and width no multiple of 16": {
        "emb_dim": 60, "num_heads": 3, "num_layers": 3, "context_length": 37, "tie_embeddings": False,
    },
    "no bias, exact GELU": {
        "emb_dim": 48, "num_heads": 1, "num_layers": 2, "context_length": 9, "qkv_bias": False,
        "exact_gelu": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_text_are_the_models(shape, tmp_path):
    config = GPTConfig(vocab_size=300, **SHAPES[shape])
    model, prompt = sharp(config, std=0.15), [7, 8, 9]
    tokens = torch.randint(0, 300, (config.context_length,)).tolist()
    form = {"prompt": prompt, "max_tokens": 200, "temperature": 0}
    path = export(tmp_path / "it.html", model, Tokenizer(vocab_size=300))
    logits, text = run(path, ["logits", tokens], ["text", form])
    with torch.no_grad():
        expected = model(torch.tensor([tokens]))[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-4, rtol=1e-4)
    written = [id_ for choice in text for id_ in choice["logprobs"]["token_ids"]]
    greedy = slow_greedy(model, prompt, 200)[3:]
    assert len(set(greedy)) > 4
    assert written == greedy


def tied(vocab_size: int = 300):
    """A small model."""
    return sharp(GPTConfig(vocab_size=vocab_size, **SHAPES["tied"]))


def strings(count: int) -> list[str]:
    """Texts of words, blanks, digits, emoji, several scripts, control characters, any characters."""
    drawn = random.Random(1)
    alphabets = [
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
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(drawn.randrange(1, 6)):
            some = [drawn.choice(drawn.choice(alphabets)) for _ in range(drawn.randrange(1, 9))]
            code = drawn.choice((drawn.randrange(0xD800), drawn.randrange(0xE000, 0x110000)))
            parts += [*some, chr(code) if drawn.random() < 0.3 else " "]
        texts.append("".join(parts))
    return texts


LETTERS = "हिन्दी में लिखा हुआ पाठ और 한글 ありがとう the quick brown fox, it's 1234 words. " * 40
VOCABULARIES = {
    "gpt2": Tokenizer,
    "a prefix": lambda: Tokenizer(vocab_size=1000),
    "learned": lambda: learn([LETTERS], Learned(n_vocab=320)),
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_ids_are_the_tokenizers(vocabulary, tmp_path):
    tokenizer = VOCABULARIES[vocabulary]()
    tiny = GPTConfig(vocab_size=tokenizer.n_vocab, context_length=4, emb_dim=2, num_heads=1, num_layers=1)
    texts = [*strings(10_000 if vocabulary in ("gpt2", "learned") else 1_000), "", "a" * 3000]
    path = export(tmp_path / "it.html", sharp(tiny), tokenizer)
    assert run(path, ["encode", texts])[0] == [tokenizer.encode(text) for text in texts]


ENDS = [
    "The ",
    "The",
    "we'l",
    "'",
    "x = foo(b",
    "def f():\n    ",
    "a\n\n",
    "it  ",
    "methodo",
    " ",
    "\n",
    "日本",
    "ab" * 90,
]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_ways_to_cut_a_prompts_last_word_are_the_engines(vocabulary, tmp_path):
    tokenizer = VOCABULARIES[vocabulary]()
    tiny = GPTConfig(vocab_size=tokenizer.n_vocab, context_length=4, emb_dim=2, num_heads=1, num_layers=1)
    texts = [*ENDS, *strings(100 if vocabulary == "learned" else 5), "", LETTERS]
    path = export(tmp_path / "it.html", sharp(tiny), tokenizer)
    for text, found in zip(texts, run(path, ["typed", texts])[0], strict=True):
        expected = typed_prompt(tokenizer, text)
        assert found["ids"] == expected.tokens, text
        assert ("ending" in found) == bool(expected.ending), text
        if expected.ending:
            ways = [
                (tuple(way["before"]), tuple(way["ids"]), way.get("end"), way["typed"])
                for way in found["ending"]["ways"]
            ]
            assert ways == [tuple(way) for way in expected.ending.ways], text
            assert tuple(found["ending"]["word"]) == expected.ending.word
            assert found["ending"]["longest"] == expected.ending.longest
            assert found["ending"]["isAll"] == expected.ending.is_all


def test_typed_prompts_are_continued_as_gpt_generate_does(tmp_path):
    tokenizer = VOCABULARIES["learned"]()
    model = sharp(GPTConfig(vocab_size=tokenizer.n_vocab, **SHAPES["tied"]), std=0.15)
    path = export(tmp_path / "it.html", model, tokenizer)
    prompts = ["the quick br", "the quick ", "it's 12", "क", "quick brown fox, it's 1234 words. it", "q"]
    settings = [
        {"temperature": 0.0},
        {"temperature": 1.2, "top_k": 40},
        {"repetition_penalty": 1.5, "top_p": 0.9},
    ]
    forms = [
        {"prompt": prompt, "max_tokens": 20, "seed": seed, **how, "echo": bool(seed % 2)}
        for prompt in prompts
        for how in settings
        for seed in range(4)
    ]
    wrong = 0
    for form, choices in zip(forms, run(path, *(["text", form] for form in forms)), strict=True):
        how = {
            key: value for key, value in form.items() if key not in ("prompt", "max_tokens", "seed", "echo")
        }
        pieces = stream_samples(
            model, tokenizer, form["prompt"], max_new_tokens=20, seed=form["seed"], sampling=Sampling(**how)
        )
        begin = form["prompt"] if form["echo"] else ""
        wrong += "".join(choice["text"] for choice in choices) != begin + "".join(text for _, text in pieces)
    assert wrong <= 1  # sums of float32 and of double meet at an edge


def test_halves_of_surrogate_pairs_are_refused(tmp_path):
    path = export(tmp_path / "it.html", tied(257))
    asked = [["broken", "ids", {"prompt": text}] for text in ("a\ud83d b", "\udc4d", "\udc4d\ud83d!", "👍")]
    *refused, whole = run(path, *asked)
    assert whole is None and all("half a character" in message for message in refused)


def test_pieces_of_text_are_whole_characters_and_end_before_a_stop_string(tmp_path):
    path = export(tmp_path / "it.html", tied(257))
    tokenizer = Tokenizer(vocab_size=257)
    texts = ["naïve 👍 END more", "ENENEND", "EN", "x\ufeffy", "END"]
    asked, expected = [], []
    for text in texts:
        ids = [*tokenizer.encode(text), 240, 159, tokenizer.eot]  # half a character at the end
        for stop in ("END", "👍", None):
            stream = TextStream(tokenizer, [stop] if stop else [])
            asked.append(["pieces", ids, stop])
            expected.append([*map(stream.feed, ids), stream.close()])
    assert run(path, *asked) == expected


SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1e-20},
    {"temperature": 1.5, "top_k": 5},
    {"top_p": 0.6, "top_k": 20},
    {"min_p": 0.1, "top_p": 0.95, "temperature": 1.3},
    {"repetition_penalty": 1.8, "temperature": 0.9, "top_k": 1000},
    {"top_k": 1},
]


def test_draws_are_the_engines(tmp_path):
    path = export(tmp_path / "it.html", tied())
    logits = torch.randn(300) * 3
    logits[[5, 6, 7]] = logits.max() - 1  # ties
    seen, numbers = [5, 100, 100, int(logits.argmax())], torch.rand(400, dtype=torch.float64).tolist()
    numbers += [0.0, 1 - 2**-24]
    asked = [["draws", logits.tolist(), settings, seen, numbers] for settings in SETTINGS]
    for settings, drawn in zip(SETTINGS, run(path, *asked), strict=True):
        rows, uniform = logits.expand(len(numbers), -1), torch.tensor(numbers, dtype=torch.float32)
        expected = sample_tokens(rows, Sampling(**settings), [seen] * len(numbers), uniform).tolist()
        differing = sum(one != other for one, other in zip(drawn, expected, strict=True))
        assert differing <= 1, settings  # sums of float32 and of double meet at an edge
        assert len(set(expected)) > 1 or settings.get("temperature") in (0, 1e-20) or settings == {"top_k": 1}


def test_a_seed_has_the_numbers_of_gpt_generate_and_they_are_uniform(tmp_path):
    path = export(tmp_path / "it.html", tied())
    seeds = [0, 1, -1, 2**40, -(2**33) - 7]
    found_ = run(path, *(["numbers", seed, 4000] for seed in seeds))
    assert found_ == [list(islice(uniform(seed, 0), 4000)) for seed in seeds]
    found = torch.tensor([*found_, list(islice(uniform(0, 1), 4000))])
    assert found.min() >= 0 and found.max() < 1 and abs(found.var() - 1 / 12) < 0.01
    assert (torch.corrcoef(found) - torch.eye(6)).abs().max() < 0.08  # of seeds and samples
    assert abs(torch.corrcoef(torch.stack([found[:, 1:].flatten(), found[:, :-1].flatten()]))[0, 1]) < 0.03


def test_requests_are_answered_as_the_server_does(tmp_path):
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
    path = export(tmp_path / "it.html", MODEL, TOKENIZER)
    *texts, seen = run(path, *(["text", form] for form in forms), ["attention", look])
    for answer, choices in zip(answers, texts, strict=True):
        (expected,) = answer["choices"]
        assert "".join(choice["text"] for choice in choices) == expected["text"]
        assert choices[-1]["finish_reason"] == expected["finish_reason"]
        for name in ("tokens", "token_ids", "token_logprobs", "top_logprobs"):
            found = [value for choice in choices for value in choice["logprobs"][name]]
            for one, other in zip(found, expected["logprobs"][name], strict=True):
                assert one == pytest.approx(other, abs=1e-4)
    assert seen["tokens"] == attention["tokens"]
    found, expected = torch.tensor(seen["weights"]), torch.tensor(attention["weights"])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_a_conversation_is_the_templates(tmp_path):
    template = Template(system="S{content}\n", user="U {content}$&\n", assistant="A: {content}")
    tokenizer = Tokenizer(vocab_size=300)
    path = export(tmp_path / "it.html", tied(), tokenizer, template)
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": f"{role} <|endoftext|> {{content}}"} for role in roles]
    assert run(path, ["ids", {"messages": messages}])[0] == template.prompt(tokenizer, messages)


def test_attention_in_the_middle_of_a_text_leaves_the_text_as_it_is(tmp_path):
    """A look back at a token of the text, at another text and at another model, between two tokens."""
    model = tied()
    path = export(tmp_path / "it.html", model)
    form = {"prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0}
    alone, together = run(path, ["text", form], ["interrupted", form])
    assert len(together) == len(alone) == 40
    for one, other in zip(alone, together, strict=True):
        assert one["logprobs"]["token_ids"] == other["logprobs"]["token_ids"] and one["text"] == other["text"]


def test_runs_that_stand_in_the_training_text_are_found(tmp_path):
    text = np.arange(100, 140, dtype=np.uint16)
    path = export(tmp_path / "it.html", tied(), text=text)
    ids = [*range(100, 114), 9, *range(120, 131), 9, *range(128, 140)]
    assert run(path, ["copied", {"tokens": ids}]) == [{"runs": [[0, 14], [27, 39]]}]
