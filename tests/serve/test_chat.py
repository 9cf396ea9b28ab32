import pytest

from gpt.text.template import Template
from tests.serve.server import TOKENIZER, alone, choice_of, events, new_app, post, streamed

TEMPLATE = Template(system="S{content}", user="U{content}\n", assistant="A{content}")
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "search_notes", "parameters": {"type": "object"}}}


def chat(template=TEMPLATE, **form):
    return post(new_app(template=template), "/v1/chat/completions", **{"messages": HI, **form})


def text_part(text: str) -> list[dict[str, str]]:
    """A message's content as a list of parts."""
    return [{"type": "text", "text": text}]


def test_a_reply_follows_the_conversation_in_the_template():
    messages = [
        {"role": "developer", "content": "x"},
        *HI,
        {"role": "assistant", "content": "Yes", "refusal": None},
        {"role": "user", "content": text_part("<|endoftext|>")},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": text_part("")},
    ]
    response = chat(messages=messages, max_tokens=9, temperature=0)
    ids = [TOKENIZER.eot]
    for turn in ("SxUHi\nAYes", "U<|endoftext|>\nA"):
        ids += [*TOKENIZER.encode(turn), TOKENIZER.eot]
    ids += TOKENIZER.encode("U\nA")
    choice, body = choice_of(response), response.json()
    assert body["object"] == "chat.completion" and len(body["id"]) == 32
    assert choice["message"] == {"role": "assistant", "content": alone(ids, 9, temperature=0)}
    assert choice["finish_reason"] in ("stop", "length") and choice["logprobs"] is None
    assert body["usage"]["prompt_tokens"] == len(ids)


def test_what_clients_send_besides_changes_nothing():
    asked = {"max_tokens": 9, "temperature": 0}
    sent = {
        "user": "someone", "metadata": {"chat": "1"}, "store": False, "service_tier": "auto",
        "parallel_tool_calls": True, "safety_identifier": "x", "prompt_cache_key": "y", "logprobs": False,
        "reasoning_effort": "high",
        "tools": [TOOL], "functions": [TOOL["function"]], "tool_choice": "auto",
        "prompt_cache_options": {"ttl": "30m"}, "logit_bias": {}, "response_format": {"type": "text"},
        "modalities": ["text"], "n": None, "stop": "", "seed": None, "top_logprobs": None,
        "presence_penalty": 0.0, "frequency_penalty": 0, "best_of": 1, "suffix": "", "echo": False,
        "prompt": "",
    }  # fmt: skip
    assert choice_of(chat(**asked, **sent)) == choice_of(chat(**asked))


def test_the_stream_adds_up_to_the_reply():
    form = {"max_completion_tokens": 12, "seed": 2, "n": 2}
    whole = chat(**form).json()
    response = chat(**form, stream=True, stream_options={"include_usage": True})
    assert {event["object"] for event in events(response)} == {"chat.completion.chunk"}
    assert events(response)[-1]["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        first, *others = [piece["delta"] for piece in streamed(response, index)]
        assert "".join(delta["content"] for delta in (first, *others)) == choice["message"]["content"]
        assert first["role"] == "assistant" and not any("role" in delta for delta in others)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"messages": []}, "expected a list of messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "message 1 has the role 'tool'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.list.0.type: Input should be 'text'",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "content: expected a text or a list of parts"),
        ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, "the last message is the assistant's"),
        ({"template": None}, "has no template for a chat"),
        ({"logprobs": True}, "a chat has none"),
        ({"echo": True}, "echo is for completions: a chat has none"),
        ({"prompt": "Hi"}, "prompt: a chat has messages instead, leave it out"),
        ({"prompt": [65], "messages": None}, "prompt: a chat has messages instead, leave it out"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice: "),
        ({"function_call": {"name": "search_notes"}}, "function_call: "),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"presence_penalty": 1}, "presence_penalty: this is not supported here"),
        ({"frequency_penalty": -0.5}, "frequency_penalty: this is not supported here"),
        ({"logit_bias": {"9": 1}}, "logit_bias: this is not supported here"),
        ({"best_of": 2}, "best_of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_answered(form, message):
    response = chat(**form)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"]
