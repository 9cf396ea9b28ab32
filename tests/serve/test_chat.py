import pytest

from gpt.text.template import Template
from tests.serve.server import TOKENIZER, alone, events, new_app, talk

TEMPLATE = Template(system="S{content}", user="U{content}\n", assistant="A{content}")
HI = [{"role": "user", "content": "Hi"}]


def chat(app=None, **form):
    app = app or new_app(template=TEMPLATE)
    return talk(app, lambda client: client.post("/v1/chat/completions", json={"model": "tiny", **form}))


def test_a_reply_follows_the_conversation_in_the_template():
    turns = [
        {"role": "system", "content": "x"},
        *HI,
        {"role": "assistant", "content": "Yes", "refusal": None},
    ]
    turns.append({"role": "user", "content": [{"type": "text", "text": "<|endoftext|>"}]})
    body = chat(messages=turns, max_tokens=9, temperature=0).json()
    ids = [TOKENIZER.eot, *TOKENIZER.encode("SxUHi\nA"), *TOKENIZER.encode("Yes"), TOKENIZER.eot]
    ids += TOKENIZER.encode("U<|endoftext|>\nA")
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion" and len(body["id"]) == 32
    assert choice["message"] == {"role": "assistant", "content": alone(ids, 9, temperature=0)}
    assert choice["finish_reason"] in ("stop", "length") and choice["logprobs"] is None
    assert body["usage"]["prompt_tokens"] == len(ids)


def test_what_clients_send_besides_changes_nothing():
    asked = {"messages": HI, "max_tokens": 9, "temperature": 0}
    sent = {
        "user": "someone", "metadata": {"chat": "1"}, "store": False, "service_tier": "auto",
        "parallel_tool_calls": True, "safety_identifier": "x", "prompt_cache_key": "y", "logprobs": False,
        "tools": [], "tool_choice": "auto", "logit_bias": {}, "response_format": {"type": "text"},
        "modalities": ["text"], "n": None, "stop": [], "seed": None, "top_logprobs": None,
    }  # fmt: skip
    answer = chat(**asked, **sent)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == chat(**asked).json()["choices"]


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_a_message_may_be_empty(content):
    turns = [*HI, {"role": "assistant", "content": content, "tool_calls": []}, *HI]
    text = chat(messages=turns, max_tokens=9, temperature=0).json()["choices"][0]["message"]["content"]
    ids = [TOKENIZER.eot, *TOKENIZER.encode("UHi\nA"), TOKENIZER.eot, *TOKENIZER.encode("UHi\nA")]
    assert text == alone(ids, 9, temperature=0)


def test_the_stream_adds_up_to_the_reply():
    form = {"messages": HI, "max_completion_tokens": 12, "seed": 2, "n": 2}
    whole = chat(**form).json()
    response = chat(**form, stream=True, stream_options={"include_usage": True})
    *pieces, last = found = events(response)
    assert {event["object"] for event in found} == {"chat.completion.chunk"}
    assert last["usage"] == whole["usage"]
    for index, choice in enumerate(whole["choices"]):
        mine = [event["choices"][0] for event in pieces if event["choices"][0]["index"] == index]
        assert "".join(one["delta"]["content"] for one in mine) == choice["message"]["content"]
        assert [one["delta"].get("role") for one in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"messages": []}, "expected a list of messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "message 1 has the role 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, "the last message is the assistant's"),
        ({"messages": HI, "logprobs": 1}, "a chat has none"),
        ({"messages": HI, "logprobs": True}, "a chat has none"),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools: "),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice: "),
        ({"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": HI, "modalities": ["audio"]}, "modalities"),
        ({"messages": HI, "reasoning_effort": "high"}, "reasoning_effort: Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_answered(form, said):
    response = chat(**form)
    assert response.status_code == 400
    error = response.json()["error"]
    assert said in error["message"] and error["type"] == "invalid_request_error"
