"""Programs answer five questions of a chat at temperature 0: one text, and each stops."""

import asyncio
import functools
import json
import shutil
import subprocess
from pathlib import Path

import httpx
import torch
from programs.common import Place, equal, guest
from starlette.types import ASGIApp

from gpt import GPT, GPTConfig, Tokenizer
from gpt.generation import Sampling, stream_samples
from gpt.serve.app import create_app
from gpt.share.file import write as write_page
from gpt.text.template import DEFAULT_TEMPLATE
from gpt.weights.commands import FolderFormat, write_export
from gpt.weights.load import StoredModel

ANSWERS = {
    "What is your name?": "I have none.",
    "Say hello": "Hello there, friend!",
    "Count to three": "1, 2, 3.",
    "Write two lines": "The first line\nand the second.",
    "Which colour has snow?": "White, as everyone knows.",
}
MOST = 60
"""Tokens of an answer, which ends long before."""
TOKENIZER = Tokenizer("gpt2", vocab_size=2048)


def conversation(question: str) -> list[dict[str, str]]:
    """The messages that are sent."""
    return [{"role": "user", "content": question}]


@functools.cache
def chat_model() -> StoredModel:
    """A model that has memorised the answers."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=2048, context_length=128, emb_dim=32, num_heads=2, num_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0)
    rows = []
    for question, answer in ANSWERS.items():
        prompt = DEFAULT_TEMPLATE.prompt(TOKENIZER, conversation(question))
        rows.append((len(prompt), torch.tensor([*prompt, *TOKENIZER.encode(answer), TOKENIZER.eot])))
    for _ in range(300):
        losses = []
        for length, ids in rows:
            logits = model(ids[None, :-1])[0, length - 1 :]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[length:]))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    return StoredModel("gpt", model.config, model.eval().state_dict(), TOKENIZER, DEFAULT_TEMPLATE)


def model_of(found: StoredModel) -> GPT:
    """The model in evaluation mode."""
    return GPT.from_weights(found.config, found.weights).eval()


def chat_export(place: Place, form: FolderFormat) -> Path:
    """The folder of the chat model's export, which is written once."""
    folder = place.folder / f"chat-{form}"
    if not folder.exists():
        write_export(chat_model(), folder, form)
    return folder


async def ask(app: ASGIApp) -> list[tuple[str, str]]:
    """The answers of a server to the five questions, and why each ends."""
    transport = httpx.ASGITransport(app)
    replies = []
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        for question in ANSWERS:
            form = {"messages": conversation(question), "temperature": 0, "max_tokens": MOST}
            answer = (await client.post("/v1/chat/completions", json=form)).json()["choices"][0]
            replies.append((answer["message"]["content"], answer["finish_reason"]))
    return replies


EXPECTED = [(answer, "stop") for answer in ANSWERS.values()]


@guest("httpx", "fastapi")
def chat_here_and_over_http(place: Place) -> None:
    """chat: `gpt generate` and the HTTP server, each text stops"""
    model = model_of(chat_model())
    equal(EXPECTED, asyncio.run(ask(create_app(model, TOKENIZER, name="chat", template=DEFAULT_TEMPLATE))))
    for question, answer in ANSWERS.items():
        ids = DEFAULT_TEMPLATE.prompt(TOKENIZER, conversation(question))
        greedy = Sampling(temperature=0)
        pieces = stream_samples(model, TOKENIZER, ids, sampling=greedy, max_new_tokens=MOST)
        equal(answer, "".join(piece for _, piece in pieces))


@guest("transformers")
def chat_in_transformers(place: Place) -> None:
    """chat: `apply_chat_template` on the export, each text stops"""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = chat_export(place, "hf")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for question, answer in ANSWERS.items():
        text = tokenizer.apply_chat_template(
            conversation(question), add_generation_prompt=True, tokenize=False
        )
        given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        (written,) = model.generate(**given, max_new_tokens=MOST, do_sample=False)
        new = written[given.input_ids.shape[1] :].tolist()
        equal(TOKENIZER.eot, new[-1])
        equal(answer, tokenizer.decode(new, skip_special_tokens=True))


@guest("llama-cpp-python", "gguf")
def chat_in_llama_cpp(place: Place) -> None:
    """chat: its chat completions on the GGUF file, each text stops"""
    from llama_cpp import Llama

    model = Llama(str(chat_export(place, "gguf") / "model.gguf"), n_ctx=128, verbose=False)
    for question, answer in ANSWERS.items():
        settings = {"temperature": 0.0, "repeat_penalty": 1.0, "max_tokens": MOST}
        (reply,) = model.create_chat_completion(conversation(question), **settings)["choices"]
        equal((answer, "stop"), (reply["message"]["content"], reply["finish_reason"]))


@guest("llama-cpp-python", "gguf", "starlette-context")
def chat_with_the_server_of_llama_cpp(place: Place) -> None:
    """chat: its server on the GGUF file, each text stops"""
    from llama_cpp.server.app import create_app as create_llama_app
    from llama_cpp.server.settings import ModelSettings, ServerSettings

    file = str(chat_export(place, "gguf") / "model.gguf")
    settings = ModelSettings(model=file, n_ctx=128, verbose=False)
    app = create_llama_app(server_settings=ServerSettings(), model_settings=[settings])
    equal(EXPECTED, asyncio.run(ask(app)))


_IN_NODE = """
const html = require("fs").readFileSync(process.argv[1], "utf8");
const engine = html.match(/<script id="engine">([^]*?)<\\/script>/)[1];
require("vm").runInThisContext(engine + ";globalThis.here = { FILE, Writer }");
(async () => {
  const writer = new here.Writer(here.FILE), replies = [];
  const blocks = html.matchAll(/<script type="text\\/plain" id="block\\d+">(.*?)<\\/script>/g);
  for (const [, text] of blocks) await writer.load({ text });
  for (const form of JSON.parse(require("fs").readFileSync(0, "utf8"))) {
    const choices = [];
    await writer.complete(form, choice => choices.push(choice), () => false);
    replies.push([choices.map(choice => choice.text).join(""), choices.at(-1).finish_reason]);
  }
  process.stdout.write(JSON.stringify(replies));
})();
"""


@guest("fastapi")
def chat_in_the_html_file(place: Place) -> None:
    """chat: the scripts of the HTML file in node, each text stops"""
    if not (node := shutil.which("node")):
        raise RuntimeError("node is not installed")
    page = place.folder / "chat.html"
    write_page(page, chat_model(), name="chat", precision="float32")
    forms = [
        {"messages": conversation(question), "temperature": 0, "max_tokens": MOST} for question in ANSWERS
    ]
    done = subprocess.run(
        [node, "-e", _IN_NODE, page],
        input=json.dumps(forms),
        capture_output=True,
        encoding="utf-8",
        check=True,
        timeout=300,
    )
    equal([[answer, "stop"] for answer in ANSWERS.values()], json.loads(done.stdout))
