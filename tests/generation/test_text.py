import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt import Tokenizer
from gpt.errors import InputError
from gpt.generation.text import TextStream

BYTES = Tokenizer("gpt2", vocab_size=257)  # a token a byte: every character beyond ASCII spans tokens


def pieces(
    text: str, stop: tuple[str, ...] = (), tokenizer: Tokenizer = BYTES
) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stop)
    given_out = []
    for token in tokenizer.encode(text):
        given_out.append(stream.feed(token))
        if stream.stopped:
            break
    return [*given_out, stream.close()], stream


def test_an_emoji_comes_whole():
    given_out, _ = pieces("a🙂é")
    assert [piece for piece in given_out if piece] == ["a", "🙂", "é"]


def test_bytes_that_are_no_character_do_not_stop_the_text():
    stream = TextStream(BYTES)
    broken = BYTES.encode("🙂")[0]
    assert stream.feed(broken) + stream.feed(BYTES.encode("a")[0]) == "\ufffda"


def test_the_end_of_text_has_no_text():
    assert TextStream(BYTES).feed(BYTES.eot) == ""


def test_a_stop_string_inside_one_token():
    words = Tokenizer("gpt2")
    assert len(words.encode(" hello")) == 1
    assert "".join(pieces("say hello there", stop=("ell",), tokenizer=words)[0]) == "say h"


@given(
    st.text(alphabet="ab🙂é", max_size=30),
    st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), max_size=3),
)
def test_pieces_join_to_the_text_before_the_first_stop(text, stop):
    given_out, stream = pieces(text, tuple(stop))
    cuts = [text.find(s) for s in stop if s in text]
    # What counts is the string that is complete first, not the one that begins first.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    expected = text if not cuts else text[: min(at for end, at in ends if end == min(ends)[0])]
    assert "".join(given_out) == expected
    assert stream.stopped == bool(cuts)
    assert not any("\ufffd" in piece for piece in given_out)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InputError, match="stop string"):
        TextStream(BYTES, ("",))
