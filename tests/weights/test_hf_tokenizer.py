from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpt import Tokenizer
from gpt.weights.formats.hf import write_tokenizer

SIZES = (257, 300, 50257)
TEXTS = [
    "Hello, world! It's 12345 o'clock.  \n\n\tdef f(x):\n    return x ** 2\n",
    "naïve café — “quotes” … 你好 мир 🤖👩‍👩‍👧 \u00a0\u200b\x00\x7f",
    "  leading and trailing 'S 'll I'VE we'd\r\n",
]


@cache
def pair(size: int):
    from transformers import AutoTokenizer

    tokenizer = Tokenizer("gpt2", vocab_size=size)
    with TemporaryDirectory() as folder:
        write_tokenizer(tokenizer, Path(folder), context_length=64)
        return tokenizer, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("size", SIZES)
@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
@example(TEXTS[0])
@example(TEXTS[1])
@example(TEXTS[2])
@settings(max_examples=100, deadline=None)
def test_transformers_gives_the_same_ids_for_any_text(size, text):
    ours, theirs = pair(size)
    ids = ours.encode(text)
    assert theirs(text, split_special_tokens=True)["input_ids"] == ids
    assert theirs.decode(ids) == text


@pytest.mark.parametrize("size", SIZES)
def test_endoftext_is_the_last_id(size):
    ours, theirs = pair(size)
    assert len(theirs) == size
    assert theirs.eos_token_id == ours.eot == size - 1
    assert theirs.model_max_length == 64
    text = "one<|endoftext|>two"
    assert theirs(text)["input_ids"] == ours.encode(text, allow_special=True)
