"""Programs that talk to `gpt serve`."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.common import listening
from programs.chat import ANSWERS, MOST, TOKENIZER, chat_model, conversation, model_of
from programs.common import NEW, PROMPT, Place, equal, guest, refused
from programs.harness import HarnessTasks

from gpt.serve.app import create_app
from gpt.text.template import DEFAULT_TEMPLATE

TEXTS = list(ANSWERS.values())


@contextmanager
def chat_server() -> Iterator[str]:
    """The address of the API of a server with the chat model, whose name is `chat`."""
    app = create_app(model_of(chat_model()), TOKENIZER, name="chat", template=DEFAULT_TEMPLATE)
    with listening(app, log_level="critical") as address:
        yield f"{address}/v1"


@guest("openai")
def openai_client(place: Place) -> None:
    """completions, stream, models, 400 for chat"""
    import openai

    client = openai.OpenAI(base_url=f"{place.address}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    equal(place.text, client.completions.create(**asked).choices[0].text)
    streamed = client.completions.create(**asked, stream=True)
    equal(place.text, "".join(part.choices[0].text for part in streamed if part.choices))
    equal(["tiny"], [model.id for model in client.models.list()])
    equal("tiny", client.models.retrieve("tiny").id)
    with refused(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])


@guest("openai")
def openai_chat(place: Place) -> None:
    """chat: answers, streams, the asynchronous client, a wrong base URL"""
    import openai

    async def asynchronous(address: str) -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            replies = [client.chat.completions.create(**asked(question)) for question in ANSWERS]
            return [reply.choices[0].message.content for reply in await asyncio.gather(*replies)]

    def asked(question: str) -> dict[str, Any]:
        return {
            "model": "chat", "messages": conversation(question), "temperature": 0,
            "max_completion_tokens": MOST,
        }  # fmt: skip

    with chat_server() as address:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        create = client.chat.completions.create
        equal(TEXTS, [create(**asked(question)).choices[0].message.content for question in ANSWERS])
        streams = [create(**asked(question), stream=True) for question in ANSWERS]
        equal(TEXTS, ["".join(part.choices[0].delta.content or "" for part in one) for one in streams])
        equal(TEXTS, asyncio.run(asynchronous(address)))
        with refused(openai.NotFoundError, "expected /v1/chat/completions"):
            client.responses.create(model="chat", input="Hi")


@guest("langchain-openai")
def langchain_chat(place: Place) -> None:
    """chat: invoke, stream, batch, abatch, tools offered; structured output is refused by name"""
    import openai
    from langchain_openai import ChatOpenAI

    schema = {"title": "name", "type": "object", "properties": {"name": {"type": "string"}}}
    refusals = {
        "function_calling": "tool_choice",
        "json_mode": "response_format",
        "json_schema": "response_format",
    }
    with chat_server() as address:
        where = {"base_url": address, "api_key": "none", "max_retries": 0}
        model = ChatOpenAI(**where, model="chat", temperature=0, max_tokens=MOST)
        equal(TEXTS, [model.invoke(question).content for question in ANSWERS])
        equal(TEXTS, ["".join(part.content for part in model.stream(question)) for question in ANSWERS])
        equal(TEXTS, [reply.content for reply in model.batch(list(ANSWERS))])
        equal(TEXTS, [reply.content for reply in asyncio.run(model.abatch(list(ANSWERS)))])
        offered = model.bind_tools([{"name": "search", "description": "searches", "parameters": schema}])
        equal(TEXTS, [offered.invoke(question).content for question in ANSWERS])
        for method, field in refusals.items():
            with refused(openai.BadRequestError, field):
                model.with_structured_output(schema, method=method).invoke("Say hello in JSON")


@guest("langchain-openai")
def langchain(place: Place) -> None:
    """invoke, stream, twenty prompts a request"""
    from langchain_openai import OpenAI

    where = {"base_url": f"{place.address}/v1", "api_key": "none", "max_retries": 0}
    model = OpenAI(**where, model="tiny", temperature=0, max_tokens=NEW)
    equal(place.text, model.invoke(PROMPT))
    equal(place.text, "".join(model.stream(PROMPT)))
    texts = [replies[0].text for replies in model.generate([PROMPT] * 20).generations]
    equal([place.text] * 20, texts)


@guest("litellm")
def litellm(place: Place) -> None:
    """text completion, stream"""
    import litellm

    asked = {
        "model": "text-completion-openai/tiny", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0,
        "api_base": f"{place.address}/v1", "api_key": "none",
    }  # fmt: skip
    equal(place.text, litellm.text_completion(**asked).choices[0].text)
    streamed = litellm.text_completion(**asked, stream=True)
    equal(place.text, "".join(part.choices[0].text or "" for part in streamed))


@guest("litellm")
def litellm_chat(place: Place) -> None:
    """chat: completion, acompletion, stream, asynchronous stream, batch_completion"""
    import litellm

    with chat_server() as address:
        where = {
            "model": "openai/chat", "api_base": address, "api_key": "none", "temperature": 0,
            "max_tokens": MOST, "num_retries": 0,
        }  # fmt: skip
        chats = [conversation(question) for question in ANSWERS]

        async def asynchronous() -> tuple[list[str], list[str]]:
            whole = [await litellm.acompletion(**where, messages=one) for one in chats]
            texts = []
            for one in chats:
                stream = await litellm.acompletion(**where, messages=one, stream=True)
                texts.append("".join([part.choices[0].delta.content or "" async for part in stream]))
            return [reply.choices[0].message.content for reply in whole], texts

        replies = [litellm.completion(**where, messages=one) for one in chats]
        equal(TEXTS, [reply.choices[0].message.content for reply in replies])
        streams = [litellm.completion(**where, messages=one, stream=True) for one in chats]
        equal(TEXTS, ["".join(part.choices[0].delta.content or "" for part in one) for one in streams])
        equal((TEXTS, TEXTS), asyncio.run(asynchronous()))
        replies = litellm.batch_completion(**where, messages=chats)
        equal(TEXTS, [reply.choices[0].message.content for reply in replies])


@guest("llm")
def llm(place: Place) -> None:
    """chat and text by `extra-openai-models.yaml`: prompts, stream, a conversation"""
    folder = place.folder / "llm"
    folder.mkdir(exist_ok=True)
    with chat_server() as address:
        (folder / "extra-openai-models.yaml").write_text(
            f"- {{model_id: mine, model_name: chat, api_base: '{address}'}}\n"
            f"- {{model_id: text, model_name: tiny, api_base: '{place.address}/v1', completion: true}}\n",
            encoding="utf-8",
        )

        def said(*words: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "llm", *words, "-o", "temperature", "0"],
                env={**os.environ, "LLM_USER_PATH": str(folder)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                check=True,
                timeout=100,
            )
            return done.stdout.removesuffix("\n")

        for question, answer in ANSWERS.items():
            equal(answer, said("-m", "mine", question))
        equal(TEXTS[0], said("-m", "mine", "--no-stream", next(iter(ANSWERS))))
        said("--continue", "Say hello")
        equal(place.text, said("-m", "text", PROMPT, "-o", "max_tokens", str(NEW)))


@guest("lm_eval", "transformers")
def harness_on_the_server(place: Place) -> None:
    """`local-completions` on the server: endings, and documents longer than the context, as by forward"""
    where = {"base_url": f"{place.address}/v1/completions", "model": "tiny", "max_retries": 1}
    tokenizer = {"tokenizer_backend": "huggingface", "tokenizer": str(place.export("hf"))}
    tasks = HarnessTasks(place)
    tasks.compare_endings("local-completions", {**where, **tokenizer, "max_length": 128})
    tasks.compare_documents("local-completions", {**where, **tokenizer, "max_length": 128})


@guest("lm_eval", "transformers")
def harness_on_a_chat(place: Place) -> None:
    """chat: `local-chat-completions` on the server, all answers"""
    with chat_server() as address:
        where = {"base_url": f"{address}/chat/completions", "model": "chat", "max_retries": 1}
        equal(1.0, HarnessTasks(place).share_of_answers("local-chat-completions", where, ANSWERS))
