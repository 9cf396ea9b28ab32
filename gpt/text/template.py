"""The text around the messages of a conversation. It is plain text and is never evaluated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpt.errors import InputError
from gpt.plain import JsonObject, shown
from gpt.text.table import END_OF_TEXT
from gpt.text.tokenizer import Tokenizer, whole_characters

PLACE = "{content}"
_LONGEST = 1 << 12


def plain_message(message: JsonObject) -> JsonObject:
    """Return a message of OpenAI's newer form in the older one, which `Template.parts` reads.

    The newer form calls the role `system` `developer`, and can have a list of parts as the content. A content
    with a part that is no text is not changed.
    """
    if message.get("role") == "developer":
        message = {**message, "role": "system"}
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(content):  # an image, for example
        return message
    return {**message, "content": "".join(texts)}


class Part(NamedTuple):
    """A part of a conversation's text: a reply, or the text before one."""

    text: str
    scored: bool
    """Whether the model learns to write it."""
    ends: bool
    """Whether it is a reply, so that `<|endoftext|>` follows. It is scored if the reply is."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """The text around a message of each role. `{content}` stands for the message and must occur once.

    A reply ends with `<|endoftext|>`, so nothing may follow `{content}` in the assistant's text. Raises
    InputError for any other text, and for one with half a surrogate pair, which UTF-8 cannot hold.
    """

    system: str = "{content}\n\n"
    """The text around the system's message. Rare."""
    user: str = "### Instruction:\n{content}\n\n"
    """The text around a prompt or the user's message. Rare."""
    assistant: str = "### Response:\n{content}"
    """The text before a completion or the assistant's message. Rare."""

    def __post_init__(self) -> None:
        for role, text in vars(self).items():
            parts = text.split(PLACE) if isinstance(text, str) else []  # a file may have null
            if len(parts) != 2 or (role == "assistant" and parts[1]) or len(text) > _LONGEST:
                rule = f"must be a text with one {PLACE}, the assistant's at its end"
                raise InputError(f"the template's {role} {rule}, got {shown(text)}")
            if whole_characters(text) != text:
                raise InputError(f"the template's {role} has half a character, got {shown(text)}")

    def to_jinja(self) -> str:
        """Return the template in Jinja for transformers and llama.cpp.

        These encode a reply together with the text before it, not part by part as training does.
        """
        cases = ""
        for role, text in vars(self).items():
            before, after = text.split(PLACE)
            after = END_OF_TEXT if role == "assistant" else after
            word = "elif" if cases else "if"
            content = f"{before!a} + message['content'] + {after!a}"
            cases += f"{{% {word} message['role'] == {role!r} %}}{{{{ {content} }}}}"
        reply = self.assistant.removesuffix(PLACE)
        return (
            f"{{{{ {END_OF_TEXT!r} }}}}{{% for message in messages %}}{cases}"
            "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
            f"{{% if add_generation_prompt %}}{{{{ {reply!a} }}}}{{% endif %}}"
        )

    def parts(self, messages: object) -> tuple[list[Part], str]:
        """Return the parts of [{"role": ..., "content": ...}, ...], and the text after the last reply.

        Before each reply there is a part that is not scored. A reply with "weight": 0 is not scored either.

        Raises InputError if the messages have another form.
        """
        if not isinstance(messages, list) or not messages:
            raise InputError(f"expected a list of messages, got {shown(messages)}")
        roles = list(vars(self))
        parts: list[Part] = []
        before = ""
        for number, message in enumerate(messages, start=1):
            content = message.get("content") if isinstance(message, dict) else None
            if not isinstance(content, str):
                raise InputError(f"message {number} has no text as its content, got {shown(message)}")
            if "role" not in message:
                raise InputError(f"message {number} has no role, got {shown(message)}")
            role = message["role"]
            if role not in roles:
                raise InputError(f"message {number} has the role {role!r:.80}, expected {', '.join(roles)}")
            opening, closing = getattr(self, role).split(PLACE)
            if role == "assistant":
                parts.append(Part(before + opening, scored=False, ends=False))
                parts.append(Part(content, scored=message.get("weight") != 0, ends=True))
                before = ""
            else:
                before += opening + content + closing
        return parts, before

    def prompt(self, tokenizer: Tokenizer, messages: Sequence[JsonObject]) -> list[int]:
        """Return the token ids of the prompt for a reply.

        The parts are encoded one by one, as in training.
        """
        parts, rest = self.parts(messages)
        ids = [tokenizer.eot]
        for part in parts:
            ids += tokenizer.encode(part.text)
            if part.ends:
                ids.append(tokenizer.eot)
        return ids + tokenizer.encode(rest + self.assistant.removesuffix(PLACE))


DEFAULT_TEMPLATE = Template()
