from hypothesis import given
from hypothesis import strategies as st

from gpt import Tokenizer
from gpt.generation.text import TextStream

BYTES = Tokenizer("gpt2", vocab_size=257)  # a token a byte: every character beyond ASCII spans tokens


def pieces(text: str, *stop: str, tokenizer: Tokenizer = BYTES) -> list[str]:
    """What a stream gives for each token of a text, up to a stop string, and at its end."""
    stream, given_out = TextStream(tokenizer, stop), []
    for token in tokenizer.encode(text):
        given_out.append(stream.feed(token))
        if stream.stopped:
            break
    return [*given_out, stream.close()]


def test_an_emoji_comes_whole():
    assert [piece for piece in pieces("a🙂é") if piece] == ["a", "🙂", "é"]


def test_bytes_that_are_no_character_do_not_stop_the_text():
    stream = TextStream(BYTES)
    broken = BYTES.encode("🙂")[0]
    assert stream.feed(broken) + stream.feed(BYTES.encode("a")[0]) == "\ufffda"


def test_the_end_of_text_has_no_text():
    assert TextStream(BYTES).feed(BYTES.eot) == ""


def test_a_stop_string_inside_one_token():
    words = Tokenizer("gpt2")
    assert len(words.encode(" hello")) == 1
    assert "".join(pieces("say hello there", "ell", tokenizer=words)) == "say h"


@given(
    st.text(alphabet="ab🙂é", max_size=30),
    st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), max_size=3),
)
def test_pieces_join_to_the_text_before_the_first_stop(text, stop):
    # What counts is the string that is complete first, and of those the one that begins first.
    places = [(text.find(string) + len(string), text.find(string)) for string in stop if string in text]
    _, begin = min(places, default=(0, len(text)))
    given_out = pieces(text, *stop)
    assert "".join(given_out) == text[:begin]
    assert not any("\ufffd" in piece for piece in given_out)
