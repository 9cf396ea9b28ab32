import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpt.errors import InputError
from gpt.text.template import DEFAULT_TEMPLATE, Part, Template
from gpt.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer("gpt2", vocab_size=300)
PLAIN = Template(system="S{content};", user="U{content}:", assistant="A{content}")


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation, the user's text first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_the_replies_alone_are_scored():
    system = [{"role": "system", "content": "x"}]
    read_only = {"role": "assistant", "content": "d", "weight": 0}
    parts, rest = PLAIN.parts([*system, *said("a", "b", "c"), read_only, *said("e")])
    assert parts == [
        Part("Sx;Ua:A", scored=False, ends=False),
        Part("b", scored=True, ends=True),
        Part("Uc:A", scored=False, ends=False),
        Part("d", scored=False, ends=True),
    ]
    assert rest == "Ue:"


def test_a_prompt_is_encoded_part_by_part_and_its_text_is_plain():
    eot = TOKENIZER.eot
    ids = PLAIN.prompt(TOKENIZER, said("a", "b", "<|endoftext|>"))
    expected = [eot, *TOKENIZER.encode("Ua:A"), *TOKENIZER.encode("b"), eot]
    assert ids == [*expected, *TOKENIZER.encode("U<|endoftext|>:A")]
    assert ids.count(eot) == 2


HARD = Template(system="S'\n{content}\"é🤖", user="{{ 7 * 7 }}{content}\\", assistant="{% x %}\n{content}")


def test_jinja_renders_the_same_text():
    """Without and with an unfinished reply; a message in braces stays text."""
    render = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string
    compiled = render(HARD.to_jinja())
    messages = [{"role": "system", "content": "{{ 1 }}"}, *said("a'\"\n", "b", "ü{content}")]
    prompt = TOKENIZER.decode(HARD.prompt(TOKENIZER, messages))
    assert compiled.render(messages=messages, add_generation_prompt=True) == prompt
    reply = HARD.assistant.removesuffix("{content}")
    assert compiled.render(messages=messages) == prompt.removesuffix(reply)


BAD_TEMPLATES = {
    "no place": ({"user": "no place"}, "user must be a text with one {content}"),
    "two places": ({"user": "{content}{content}"}, "one {content}"),
    "a long text": ({"system": "{content}" + "x" * 5000}, "system must be"),
    "half a character": ({"user": "\ud800{content}"}, r"user has half a character, got '\ud800{content}'"),
    "an end after the reply": ({"assistant": "{content}\n"}, "the assistant's at its end, got"),
}


@pytest.mark.parametrize(("texts", "message"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_a_template_that_cannot_be_used(texts, message):
    with pytest.raises(InputError) as error:
        Template(**texts)
    assert message in str(error.value)


BAD_MESSAGES = {
    "none": ([], r"expected a list of messages, got \[\]"),
    "a text": ("Hi", "expected a list of messages, got 'Hi'"),
    "another role": ([{"role": "x", "content": ""}], "the role 'x', expected system, user, assistant"),
    "a list as a role": ([{"role": ["user"], "content": "x"}], r"message 1 has the role \['user'\]"),
    "no content": ([*said("a"), {"role": "user", "content": None}], "message 2 has no text as its content"),
    "no mapping": ([*said("a"), "b"], "message 2 has no text as its content, got 'b'"),
}


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_messages_that_are_none(messages, message):
    with pytest.raises(InputError, match=message):
        DEFAULT_TEMPLATE.parts(messages)
