"""`benchmark.py serve`: concurrent requests beside sequential ones; GPT-2 small, over the loopback."""

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from benchmarks.common import Report, interleave, listening, timed_rows
from benchmarks.generate import build_program

from gpt import GPT, GPTConfig, Tokenizer
from gpt.generation import for_decoding
from gpt.serve.app import create_app

CLIENTS = 16


def run(quick: bool, device: str = "cpu") -> Report:
    """Measure tokens per second of 16 concurrent requests, and of the same requests in sequence."""
    torch.manual_seed(0)
    numbers = random.Random(0)
    new = 8 if quick else 32
    forms = []
    for _ in range(CLIENTS):
        prompt = [numbers.randrange(50257) for _ in range(numbers.randint(8, 64))]
        forms.append({"prompt": prompt, "max_tokens": new, "temperature": 0})
    model = GPT(GPTConfig(num_layers=2 if quick else 12)).to(device)
    model = for_decoding(model, "bfloat16")
    build_program(model)
    with listening(create_app(model, Tokenizer(), name="random")) as address:
        ways = {
            "at once": lambda: ask(address, forms, at_once=CLIENTS),
            "one after another": lambda: ask(address, forms, at_once=1),
        }
        taken = interleave(ways, 2 if quick else 5)
    return Report(
        title=f"Serving, GPT-2 small in bfloat16, {CLIENTS} requests of {new} tokens, on {device}",
        rows=timed_rows(taken, CLIENTS * new, "tokens/s"),
        ratios={"concurrent16_vs_serial": taken["at once"].times_faster_than(taken["one after another"])},
    )


def ask(address: str, forms: list[dict[str, Any]], at_once: int) -> list[str]:
    """Send the requests, `at_once` at a time: their texts."""

    def one(form: dict[str, Any]) -> str:
        where, kind = f"{address}/v1/completions", {"Content-Type": "application/json"}
        request = urllib.request.Request(where, json.dumps(form).encode(), kind)
        with urllib.request.urlopen(request, timeout=300) as answer:
            reply = json.load(answer)
        assert reply["usage"]["completion_tokens"] == form["max_tokens"], reply
        return str(reply["choices"][0]["text"])

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, forms))
