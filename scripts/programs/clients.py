"""Programs that talk to `gpt serve`."""

from programs.common import NEW, PROMPT, Place, equal, guest


@guest("openai")
def openai_client(place: Place) -> None:
    """completions, stream, models, 400 for chat"""
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
