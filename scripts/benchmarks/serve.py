"""`benchmark.py serve`: concurrent requests beside sequential ones; GPT-2 small, over the loopback."""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from benchmarks.common import Report, interleave, say
from benchmarks.generate import build_program

from gpt import GPT, GPTConfig, Tokenizer
from gpt.generation import for_decoding
from gpt.serve.app import create_app
from gpt.serve.limits import Limits
from gpt.serve.server import Server

CLIENTS = 16


def run(quick: bool, device: str = "cpu") -> Report:
    """Measure tokens per second of 16 concurrent requests, and of the same requests in sequence."""
    torch.manual_seed(0)
    config = GPTConfig.from_name("gpt2-small", **({"num_layers": 2} if quick else {}))
    new = 8 if quick else 32
    asked = forms(new)
    model = for_decoding(GPT(config).to(device), "bfloat16")
    build_program(model)
    with listening(create_app(model, Tokenizer(), name="random")) as address:
        say(f"{CLIENTS} requests of {new} tokens, at once and one after another")
        taken = interleave(
            {
                "at once": lambda: asyncio.run(ask(address, asked, at_once=CLIENTS)),
                "one after another": lambda: asyncio.run(ask(address, asked, at_once=1)),
            },
            2 if quick else 5,
        )
    speeds = {name: CLIENTS * new / timing.median for name, timing in taken.items()}
    return Report(
        title=f"Serving, GPT-2 small in bfloat16, {CLIENTS} requests of {new} tokens, on {device}",
        rows=[
            {"requests": name, "tokens/s": speed, "spread": taken[name].spread}
            for name, speed in speeds.items()
        ],
        ratios={"concurrent16_vs_serial": taken["at once"].times_faster_than(taken["one after another"])},
        bars={"16 requests": speeds},
        unit="tokens per second",
    )


def forms(new: int) -> list[dict[str, Any]]:
    """Requests with prompts of 8 to 64 tokens."""
    numbers = random.Random(0)
    return [
        {
            "model": "random",
            "prompt": [numbers.randrange(50257) for _ in range(numbers.randint(8, 64))],
            "max_tokens": new,
            "temperature": 0,
        }
        for _ in range(CLIENTS)
    ]


async def ask(address: str, forms: list[dict[str, Any]], at_once: int) -> None:
    """Send the requests, `at_once` at a time."""
    import httpx

    places = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=address, timeout=300) as client:

        async def one(form: dict[str, Any]) -> None:
            async with places:
                answer = await client.post("/v1/completions", json=form)
                assert answer.json()["usage"]["completion_tokens"] == form["max_tokens"], answer.text

        await asyncio.gather(*(one(form) for form in forms))


@contextmanager
def listening(app: Any, limits: Limits | None = None, log_level: str = "error") -> Iterator[str]:
    """The address of a server in a thread of this process."""
    server = Server(app, limits or Limits(), host="127.0.0.1", port=0, log_level=log_level)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
