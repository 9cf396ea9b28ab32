"""Send a server many requests of every kind, and see that it stays sound: `python scripts/soak.py`.

Some of the requests are hostile: fields with any value, bodies that are not JSON, requests that are not HTTP,
are cut off, or whose reply is read slowly. The exit status is 1 if one hung or failed by the server's fault,
if a greedy reply differs from the one computed by itself, if memory grew, or if a request is open at the end.
"""

import argparse
import json
import math
import random
import resource
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import torch
from benchmarks.common import listening

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.errors import InputError
from gpt.generation import build, for_decoding
from gpt.serve.app import create_app
from gpt.serve.errors import SERVER_FAILED
from gpt.serve.limits import RequestLimits
from gpt.serve.requests import CompletionRequest
from gpt.weights.rounding import WeightPrecision

CLIENTS = 24
PATIENCE = 40.0
"""Seconds after which a request without an answer counts as hung; the server itself gives up earlier."""
LIMITS = RequestLimits(arrival_seconds=10, max_seconds=10, last_seconds=1, cost=1 << 14)
VALUES: tuple[object, ...] = (
    *(None, True, 0, 1, -1, 65, 10**6, 2**64, 10**400, 0.5, 1e-50, 1e300, math.inf, math.nan),
    *("", "a b", "<|endoftext|>", "\x00", "\ud83d", "\u202e", "y" * 5000, [], {}, [[[[]]]], ["a"] * 2000),
)
BODIES = (
    *(b"", b"[" * 50_000, b'{"a":' * 20_000, b"\xff\xfe{}", b'{"prompt": [' + b"[]," * 60_000 + b"[]]}"),
    *(b'{"max_tokens": ' + b"9" * 5000 + b"}", b"x" * 2_000_000),
)
HEADS = ("POST /v1/models/../../etc/passwd", "POST //evil.example/", "BREW /", "POST /" + "a" * 5000, "")
HEADERS = ("Content-Length: -1", "Transfer-Encoding: chunked", "Host: evil.example", "X" * 3000 + ": y")


def good_form(chance: random.Random) -> dict[str, Any]:
    """A request; of them those with temperature 0 have one answer."""
    return {
        "prompt": [chance.randrange(299) for _ in range(int(chance.expovariate(1 / 10)) + 1)],
        "max_tokens": chance.randint(1, 24),
        "temperature": chance.choice((0, 0, 0.7, 1.5)),
        "stream": chance.random() < 0.3,
        "n": chance.choice((1, 1, 1, 3)),
    }


def request(body: bytes, head: str = "POST /v1/completions", header: str = "X: y") -> bytes:
    """A request after whose answer the connection ends."""
    lines = f"{head} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{header}\r\n"
    return f"{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def hostile(chance: random.Random) -> bytes:
    """A request with something wrong, or nothing."""
    form = good_form(chance)
    for name in chance.sample([*CompletionRequest.model_fields, "__class__"], chance.choice((0, 1, 1, 2))):
        form[name] = chance.choice(VALUES)
    body = json.dumps(form).encode("utf-8", "surrogatepass")
    kind = chance.random()
    if kind < 0.1:
        return request(chance.choice((*BODIES, body[: len(body) // 2], chance.randbytes(100))))
    if kind < 0.2:
        return request(body, head=chance.choice(HEADS))
    if kind < 0.3:
        return request(body, header=chance.choice(HEADERS))
    return request(body)


def exchange(port: int, data: bytes, manner: str = "at once") -> bytes:
    """Send a request and return the answer. It is empty if the connection was closed before one came."""
    answer = b""
    where = ("127.0.0.1", port)
    with suppress(ConnectionError), socket.create_connection(where, timeout=PATIENCE) as connection:
        if manner == "cut off":
            connection.sendall(data[: len(data) // 2])
            return b""
        connection.sendall(data)
        if manner == "read slowly":
            connection.recv(20)
            time.sleep(1.5)
            return b""
        while part := connection.recv(1 << 16):
            answer += part
    return answer


def resident() -> float:
    """Memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1e6


def siege(number: int, wild: float, precision: WeightPrecision) -> dict[str, Any]:
    """Serve a tiny model in this process, send it requests, and say what was found."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=300, context_length=32, emb_dim=32, num_heads=2, num_layers=1)
    # A server builds the program for decoding while it runs, and its last digits differ from the model's own:
    # a tie could then be decided in another way than by `generate` at the end.
    with suppress(InputError):  # without a compiler nothing changes while it runs
        build.build()
    model, tokenizer = for_decoding(GPT(config), precision), Tokenizer("gpt2", vocab_size=300)
    counts = Counter[str]()
    problems = []
    memory = []
    replies = []
    app = create_app(model, tokenizer, name="tiny", limits=LIMITS, precision=precision)
    with listening(app, LIMITS, log_level="critical") as address:
        port = int(address.rpartition(":")[2])

        def send(i: int) -> None:
            chance = random.Random(i)
            form, bad = good_form(chance), chance.random() < wild
            data = hostile(chance) if bad else request(json.dumps(form).encode())
            manner = chance.choice(("at once", "at once", "cut off", "read slowly")) if bad else "at once"
            try:
                answer = exchange(port, data, manner)
            except TimeoutError:
                problems.append(f"no answer within {PATIENCE:.0f} s: {data[:600]!r}")
                return
            status = answer[9:12].decode("latin-1")
            faulty = status[:1] == "5" and status not in ("501", "503", "504")
            if faulty or (not bad and status not in ("200", "503")) or SERVER_FAILED.encode() in answer:
                problems.append(f"{data[:600]!r} -> {answer[:300]!r}")
            counts[status] += 1
            if status == "200" and not bad and form["temperature"] == 0 and not form["stream"]:
                text = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
                replies.append((form["prompt"], form["max_tokens"], text))
            if i % max(1, number // 10) == 0:
                memory.append(resident())

        began = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(send, range(number)))
        seconds = time.monotonic() - began
        if exchange(port, request(b"", "GET /health"))[9:12] != b"200":
            problems.append("at the end /health does not answer 200")
        deadline = time.monotonic() + LIMITS.max_seconds
        while app.state.service.open_cost and time.monotonic() < deadline:
            time.sleep(0.1)
        if app.state.service.open_cost:
            problems.append(f"requests that cost {app.state.service.open_cost} are still open")
    for prompt, new, text in replies:
        ids = generate(model, [prompt], max_new_tokens=new, temperature=0)[0]
        expected = tokenizer.decode(ids[len(prompt) :]).partition("<|endoftext|>")[0]
        if text != expected:
            problems.append(f"not as on an idle server: {prompt} {text!r}")
    if number >= 1000 and memory[-1] > 1.05 * memory[len(memory) // 2]:
        problems.append(f"memory grew in the second half: {memory}")
    found = {"statuses": counts, "seconds": round(seconds, 1), "replies compared": len(replies)}
    return {**found, "memory": memory, "problems": problems}


def main() -> int:
    """Send them and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--hostile", type=float, default=0.1, help="the fraction of hostile requests")
    parser.add_argument("--precision", default="bfloat16", choices=get_args(WeightPrecision))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = siege(options.requests, options.hostile, options.precision)
    print(json.dumps(found, indent=2))
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
