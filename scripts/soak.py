"""Send a server many requests of every kind, and see that it stays sound: `python scripts/soak.py`.

Of the requests, a tenth is malformed or cut off midway. At the end nothing may have failed that was not the
client's doing, memory must be flat, and every greedy reply must equal the one computed alone. The exit status
is 1 if any of this does not hold.
"""

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.generate import build_program
from benchmarks.serve import listening

from gpt import GPT, GPTConfig, Tokenizer
from gpt.files import write_json
from gpt.generation import Engine, Request, Sampling, for_decoding
from gpt.serve.app import create_app

MALFORMED: list[dict[str, Any] | bytes] = [
    b"{",
    b"\xff\xfe",
    b"[]",
    {"temperature": -1},
    {"prompt": [10**9]},
    {"max_tokens": "many"},
    {"n": 1000},
    {"model": "another"},
    {"stop": [""]},
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=24, help="requests at a time")
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    options = parser.parse_args()
    if min(options.requests, options.clients) < 1:
        parser.error(f"expected at least one request and client, got {options.requests}, {options.clients}")

    torch.manual_seed(0)
    config = GPTConfig(vocab_size=2048, context_length=128, emb_dim=128, num_heads=4, num_layers=4)
    model, tokenizer = for_decoding(GPT(config), options.precision), Tokenizer("gpt2", vocab_size=2048)
    build_program(model)
    app = create_app(model, tokenizer, name="soak")
    began = time.perf_counter()
    with listening(app) as address:
        found = asyncio.run(soak(address, options.requests, options.clients))
        found["open at the end"] = app.state.engine.open
    found["seconds"] = round(time.perf_counter() - began, 1)
    print("replies computed alone, to compare", file=sys.stderr)
    found["replies compared"] = len(found["replies"])
    found["replies that differ"] = sum(
        alone(model, tokenizer, form) != text for form, text in found.pop("replies")
    )
    memory = found["memory in MB, by tenths"]
    found["memory grew by, after the first tenth"] = growth = round(memory[-1] / memory[0] - 1, 4)
    print(json.dumps(found, indent=2))
    if options.json:
        write_json(options.json, found)
    bad = found["failed"] + found["replies that differ"] + found["open at the end"]
    sys.exit(bool(bad) or growth > 0.05)


async def soak(address: str, requests: int, clients: int) -> dict[str, Any]:
    """Send all requests, so many at a time, and count what comes back."""
    import httpx

    numbers = random.Random(0)
    counts = {"answered": 0, "refused as malformed": 0, "cut off": 0, "failed": 0}
    replies: list[tuple[dict[str, Any], str]] = []
    memory: list[float] = []
    places = asyncio.Semaphore(clients)

    async def one(client: httpx.AsyncClient) -> None:
        async with places:
            kind = await send(client, numbers, replies)
            counts[kind] += 1
        done = sum(counts.values())
        if done % max(1, requests // 10) == 0:
            memory.append(resident())
            print(f"{done} of {requests} done, {memory[-1]:.0f} MB", file=sys.stderr)

    limits = httpx.Limits(max_connections=clients + 8)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        await asyncio.gather(*(one(client) for _ in range(requests)))
        await asyncio.sleep(1)
        status = (await client.get("/health")).status_code
    counts["failed"] += status != 200
    return {**counts, "memory in MB, by tenths": memory, "replies": replies}


async def send(client: Any, numbers: random.Random, replies: list[tuple[dict[str, Any], str]]) -> str:
    """One request of a random kind; what became of it."""
    import httpx

    form = {
        "model": "soak",
        "prompt": [numbers.randrange(2047) for _ in range(int(numbers.expovariate(1 / 40)) + 1)],
        "max_tokens": numbers.randint(1, 60),
        "temperature": numbers.choice([0, 0, 0.7, 1.5]),
        "stream": numbers.random() < 0.5,
        "n": numbers.choice([1, 1, 1, 3]),
        "seed": numbers.randrange(1000),
    }
    lot = numbers.random()
    if lot < 0.05:
        bad = numbers.choice(MALFORMED)
        body = bad if isinstance(bad, bytes) else json.dumps({**form, **bad}).encode()
        answer = await client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        return "refused as malformed" if answer.status_code in (400, 404) else "failed"
    if lot < 0.10:
        try:
            answer = await client.post(
                "/v1/completions", json={**form, "max_tokens": 4000}, timeout=numbers.uniform(0.01, 0.3)
            )
        except httpx.TimeoutException:
            return "cut off"
        return "answered" if answer.status_code == 200 else "failed"  # it drew the end of text before
    answer = await client.post("/v1/completions", json=form)
    if answer.status_code != 200 or '"error"' in answer.text:
        print(answer.status_code, answer.text[:300], file=sys.stderr)
        return "failed"
    if form["temperature"] == 0:
        replies.append((form, text_of(answer.text, form["stream"])))
    return "answered"


def text_of(body: str, stream: bool) -> str:
    """The text of the first choice."""
    if not stream:
        return json.loads(body)["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    choices = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
    return "".join(choice["text"] for choice in choices if choice["index"] == 0)


def alone(model: GPT, tokenizer: Tokenizer, form: dict[str, Any]) -> str:
    """The reply with nothing beside it."""
    request = Request(
        tokens=form["prompt"],
        max_new_tokens=form["max_tokens"],
        sampling=Sampling(temperature=0),
        end=tokenizer.eot,
    )
    engine = Engine(model)
    engine.add(request)
    return tokenizer.decode(token.id for token in engine.run() if token.id != tokenizer.eot)


def resident() -> float:
    """Memory of this process now, in MB."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text(encoding="utf-8").split()[1]) * resource.getpagesize() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    main()
