from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.errors import InputError
from gpt.text.tokenizer import END_OF_TEXT, Tokenizer, split_at_words

# What tiktoken's own gpt2 encoding gives, as published in its README and in the GPT-2 literature.
KNOWN = {"hello world": [31373, 995], "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29], "": []}


@pytest.mark.parametrize(("text", "ids"), KNOWN.items())
def test_full_vocabulary_is_gpt2s(text, ids):
    assert Tokenizer("gpt2").encode(text) == ids


@pytest.mark.parametrize("size", [257, 300, 50257])
@given(text=st.text(max_size=300))
@settings(max_examples=60, deadline=None)
def test_every_text_comes_back(size, text):
    tokenizer = Tokenizer("gpt2", vocab_size=size)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.eot for i in ids)
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())


@given(
    text=st.text(alphabet=" \n\tab.'\u00e9\u4e2d\U0001f600", min_size=1, max_size=400),
    longest=st.integers(2, 40),
)
@settings(deadline=None)
def test_cutting_at_words_changes_no_ids(text, longest):
    parts = list(split_at_words(text, longest))
    assert "".join(parts) == text
    assert all(0 < len(part) <= longest for part in parts)
    encode = Tokenizer("gpt2").encoding.encode_ordinary
    if all(part[0] in " \n" and not before[-1].isspace() for before, part in pairwise(parts)):
        assert [i for part in parts for i in encode(part)] == encode(text)


@pytest.mark.parametrize(
    "text", ["^" * 1_000_000, "a" * 1_300_000, " " * 1_000_000 + "x", "\u4e2d" * 400_000]
)
@pytest.mark.timeout(60)  # in quadratic time it would take hours
def test_a_million_equal_characters(text):
    tokenizer = Tokenizer("gpt2", vocab_size=2048)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizers_with_the_same_table_are_equal():
    gpt2 = Tokenizer("gpt2", 300)
    own = Tokenizer("own", table=gpt2.tokens)
    assert own == gpt2 and hash(own) == hash(gpt2)
    assert own != Tokenizer("gpt2", 301)


def test_end_of_text_is_plain_unless_asked_for():
    tokenizer = Tokenizer("gpt2", vocab_size=2048)
    text = f"a{END_OF_TEXT}b{END_OF_TEXT}"
    assert tokenizer.eot not in tokenizer.encode(text)
    special = tokenizer.encode(text, allow_special=True)
    assert special == [*tokenizer.encode("a"), 2047, *tokenizer.encode("b"), 2047]
    assert tokenizer.decode(special) == text


@pytest.mark.parametrize("wrong", [2048, 50257, -1])
def test_an_id_outside_the_vocabulary_is_refused(wrong):
    with pytest.raises(InputError, match=rf"{wrong} .*2048"):
        Tokenizer("gpt2", vocab_size=2048).decode([5, wrong])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("gpt3",), "gpt3"), (("gpt2", 256), "257 to 50257, got 256"), (("gpt2", 50258), "50258")],
)
def test_unknown_tokenizers_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        Tokenizer(*arguments)
