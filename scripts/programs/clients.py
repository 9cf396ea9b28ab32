"""Programs that talk to `gpt serve`."""

from programs.common import NEW, PROMPT, Guest, Place, equal


def openai_client(place: Place) -> None:
    """Completions, a stream, the list of models, and the error for chat without a template."""
    import openai

    client = openai.OpenAI(base_url=f"{place.address}/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    equal(place.text, client.completions.create(**asked).choices[0].text)
    streamed = client.completions.create(**asked, stream=True)
    equal(place.text, "".join(part.choices[0].text for part in streamed if part.choices))
    equal(["tiny"], [model.id for model in client.models.list()])
    equal("tiny", client.models.retrieve("tiny").id)
    try:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    except openai.BadRequestError:
        return
    raise AssertionError("chat completions are not refused with 400")


def langchain(place: Place) -> None:
    """One prompt, a stream, and twenty prompts in one request, which is its default."""
    from langchain_openai import OpenAI

    model = OpenAI(
        base_url=f"{place.address}/v1",
        api_key="none",
        model="tiny",
        temperature=0,
        max_tokens=NEW,
        max_retries=0,
    )
    equal(place.text, model.invoke(PROMPT))
    equal(place.text, "".join(model.stream(PROMPT)))
    texts = [replies[0].text for replies in model.generate([PROMPT] * 20).generations]
    equal([place.text] * 20, texts)


def litellm(place: Place) -> None:
    """A text completion and a stream."""
    import litellm

    asked = {
        "model": "text-completion-openai/tiny", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0,
        "api_base": f"{place.address}/v1", "api_key": "none",
    }  # fmt: skip
    equal(place.text, litellm.text_completion(**asked).choices[0].text)
    streamed = litellm.text_completion(**asked, stream=True)
    equal(place.text, "".join(part.choices[0].text or "" for part in streamed))


def harness_over_http(place: Place) -> None:
    """lm-evaluation-harness's `local-completions` with echo."""
    from programs.harness import agree_with_ours, run

    arguments = {
        "base_url": f"{place.address}/v1/completions", "model": "tiny", "max_length": 128,
        "tokenizer_backend": "huggingface", "tokenizer": str(place.export("hf")),
    }  # fmt: skip
    agree_with_ours(place, run(place, "local-completions", arguments))


GUESTS = (
    Guest("openai", "completions, stream, models, 400 for chat", ("openai",), ("openai",), openai_client),
    Guest(
        "LangChain", "invoke, stream, twenty prompts a request", ("langchain-openai",), ("langchain_openai",),
        langchain,
    ),
    Guest("LiteLLM", "text completion, stream", ("litellm",), ("litellm",), litellm),
    Guest(
        "lm-evaluation-harness",
        "`local-completions` over HTTP: log-probabilities and accuracy as by forward",
        ("lm_eval",), ("lm_eval", "transformers", "aiohttp", "tenacity"), harness_over_http,
    ),
)  # fmt: skip
