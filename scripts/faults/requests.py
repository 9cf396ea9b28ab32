"""Requests of every kind to a server, hostile ones among good ones, for `torture.py` and `soak.py`.

A grammar over the schema of /v1/completions makes bodies with values of every kind for every field. Others
are not JSON or not HTTP. Some arrive slowly, are read slowly, or are cut off. No request may hang or fail by
the server's fault, each greedy reply must equal the one computed alone, memory must be flat, and the server
opens no connection, starts no process and writes nothing.
"""

import asyncio
import json
import math
import random
import resource
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from faults.watched import watch

CLIENTS = 24
PATIENCE = 40.0
"""Seconds after which a request without an answer counts as hung; the server itself gives up earlier."""
LIMITS = {
    **{"seconds": 10, "last_seconds": 1, "cost": 1 << 14, "body_bytes": 1 << 18},
}
VALUES = (
    *(None, True, False, 0, 1, -1, 2, 16, 65, 300, 10**6, 2**31, 2**63, 2**64, 10**400),
    *(0.5, 1.0, -0.0, 1e-50, 1e-40, 1e300, -1e300, math.inf, -math.inf, math.nan),
    *("", "x", "a b", "<|endoftext|>", "\x00", "\ud83d", "\u202e", "é" * 50, "y" * 5000, "1"),
)
BODIES = (
    *(b"", b"[" * 50_000, b'{"a":' * 20_000, b"[" + b"[]," * 60_000 + b"[]]", b"\xff\xfe{}"),
    b'{"prompt": [' + b"[]," * 60_000 + b"[]]}",
    b'{"stream_options": {' + b",".join(b'"%d": 7' % i for i in range(20_000)) + b"}}",
    *(b'{"prompt": "a", "prompt": [1], "max_tokens": 1}', b'{"prompt": "\\ud800\\udfff\\ud83d"}'),
    *(b'{"max_tokens": ' + b"9" * 5000 + b"}", b"x" * (LIMITS["body_bytes"] + 1)),
)
PATHS = (
    *("/attention", "/v1/chat/completions", "/v1/models/%00", "/v1/models/../../etc/passwd", "/about"),
    *("//evil.example/", "/%2e%2e/%2e%2e/etc/passwd", "/" + "a" * 5000, "/?x=%ff", "*", "/"),
)
HEADERS = (
    *("Content-Length: -1", "Content-Length: " + "9" * 30, "Content-Length: 0x10", "Content-Length: 5"),
    *(
        "Content-Type: text/html",
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip",
        "Host: evil.example",
    ),
    *(
        "Authorization: Bearer " + "x" * 9000,
        "X" * 3000 + ": y",
        "Upgrade: websocket",
        "Expect: 100-continue",
    ),
)


class Grammar:
    """Makes requests as bytes; `fields` are those of the schema."""

    def __init__(self, chance: random.Random, fields: list[str]) -> None:
        self.chance, self.fields = chance, [*fields, "__class__", "x" * 500]

    def value(self, depth: int = 0) -> Any:
        """Any JSON value: plain, at a limit, of another type, or nested."""
        if depth > 3 or self.chance.random() < 0.6:
            return self.chance.choice(VALUES)
        size = self.chance.choice((0, 1, 2, 5, 20, 2000 if depth == 0 else 3))
        names = "include_usage", "1", "299", *map(str, range(1000, 1000 + size))
        values = [self.value(depth + 1) for _ in range(size)]
        return values if self.chance.random() < 0.5 else dict(zip(names, values, strict=False))

    def form(self) -> dict[str, Any]:
        """A good body; of them those with temperature 0 have one answer."""
        chance = self.chance
        return {
            "prompt": [chance.randrange(299) for _ in range(int(chance.expovariate(1 / 10)) + 1)],
            "max_tokens": chance.randint(1, 24),
            "temperature": chance.choice((0, 0, 0.7, 1.5)),
            "stream": chance.random() < 0.5,
            "n": chance.choice((1, 1, 1, 3)),
            "seed": chance.randrange(1000),
        }

    def hostile(self) -> bytes:
        """A whole HTTP request with something wrong, or nothing."""
        chance, form = self.chance, self.form()
        for name in chance.sample(self.fields, chance.choice((0, 1, 1, 1, 2, 3))):
            form[name] = self.value()
        body = json.dumps(form).encode("utf-8", "surrogatepass")
        if chance.random() < 0.15:
            body = chance.choice(
                (*BODIES, body[: len(body) // 2], b"\xef\xbb\xbf" + body, chance.randbytes(100))
            )
        rare = chance.random() < 0.15
        path = chance.choice(PATHS) if rare else "/v1/completions"
        method = chance.choice(("GET", "PUT", "BREW", "OPTIONS", "")) if chance.random() < 0.05 else "POST"
        return request(body, chance.choice(HEADERS) if chance.random() < 0.1 else "X: y", path, method)


def request(body: bytes, header: str, path: str = "/v1/completions", method: str = "POST") -> bytes:
    """A request after whose answer the connection ends."""
    head = f"{method} {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}{header}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def exchange(port: int, data: bytes, manner: str, chance: random.Random) -> bytes:
    """The answer to a request that is sent in some manner; nothing where the server closed or was left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if manner == "slow writer":
            for start in range(0, min(len(data), 2000), 100):
                writer.write(data[start : start + 100])
                await writer.drain()
                await asyncio.sleep(0.3)
            # The rest of the head: slow heads are a reverse proxy's. The rest of a long body never comes.
            writer.write(data[2000 : data.find(b"\r\n\r\n") + 4])
            await writer.drain()
        else:
            writer.write(data[: chance.randrange(len(data))] if manner == "cut off" else data)
            await writer.drain()
        if manner == "cut off":
            await asyncio.sleep(chance.uniform(0.0, 0.1))
            return b""
        if manner == "slow reader":
            await reader.read(20)
            await asyncio.sleep(1.5)
        return await reader.read()
    except (ConnectionError, asyncio.IncompleteReadError):
        return b""
    finally:
        writer.close()


def text_of(answer: bytes, stream: bool) -> str:
    """The text of the first choice."""
    body = answer.partition(b"\r\n\r\n")[2].decode()
    if not stream:
        return str(json.loads(body)["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    choices = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
    return "".join(choice["text"] for choice in choices if choice["index"] == 0)


async def send(port: int, number: int, grammar: Grammar, wild: float) -> dict[str, Any]:
    """Send so many requests, a fraction of them hostile: what was found, and the greedy replies."""
    chance, left = grammar.chance, iter(range(number))
    found: dict[str, Any] = {"counts": Counter(), "problems": [], "memory": [], "replies": []}

    async def client() -> None:
        for i in left:
            form, bad = grammar.form(), chance.random() < wild
            data = grammar.hostile() if bad else request(json.dumps(form).encode(), "X: y")
            manners = ("at once", "slow writer", "slow reader", "cut off")
            manner = chance.choices(manners, (80, 5, 5, 10))[0] if bad else "at once"
            try:
                answer = await asyncio.wait_for(exchange(port, data, manner, chance), PATIENCE)
            except (TimeoutError, asyncio.TimeoutError):  # two classes in Python 3.10
                found["problems"].append(f"no answer within {PATIENCE:.0f} s, {manner}: {data[:600]!r}")
                continue
            status = answer[9:12].decode("latin-1") if manner != "slow reader" else ""
            kind = {"2": "answered", "4": "refused", "": "no answer"}.get(status[:1], status)
            if status == "200" and not bad and form["temperature"] == 0:
                found["replies"].append((form, text_of(answer, form["stream"])))
            faulty = status[:1] == "5" and status not in ("501", "503", "504")
            if faulty or (not bad and status not in ("200", "503")) or b'"internal_error"' in answer:
                found["problems"].append(f"{data[:600]!r} -> {answer[:300]!r}")
            found["counts"][kind] += 1
            if (i + 1) % max(1, number // 10) == 0:
                found["memory"].append(resident())
                print(f"\rrequests: {i + 1} of {number}", end="", file=sys.stderr)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    print(file=sys.stderr)
    health = await exchange(port, request(b"", "X: y", "/health", "GET"), "at once", chance)
    if health[9:12] != b"200":
        found["problems"].append(f"at the end /health says {health[:300]!r}")
    return found


def resident() -> float:
    """Memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1e6


def siege(number: int, chance: random.Random, wild: float, precision: str = "float32") -> dict[str, Any]:
    """Serve a tiny model in this process, send it requests, and say what was found."""
    from benchmarks.common import listening

    from gpt import GPT, GPTConfig, Tokenizer
    from gpt.errors import InputError
    from gpt.files import cache_folder
    from gpt.generation import Engine, Request, Sampling, for_decoding
    from gpt.generation.build import build
    from gpt.serve.app import create_app
    from gpt.serve.limits import Limits
    from gpt.serve.requests import CompletionRequest

    torch.manual_seed(0)
    config = GPTConfig(vocab_size=300, context_length=32, emb_dim=32, num_heads=2, num_layers=1)
    model, tokenizer = for_decoding(GPT(config), precision), Tokenizer("gpt2", vocab_size=300)

    def alone(form: dict[str, Any]) -> str:
        """The reply with nothing beside it."""
        engine = Engine(model)
        how: dict[str, Any] = {"sampling": Sampling(temperature=0), "end": tokenizer.eot}
        engine.add(Request(tokens=form["prompt"], max_new_tokens=form["max_tokens"], **how))
        return tokenizer.decode(token.id for token in engine.run() if token.id != tokenizer.eot)

    with suppress(InputError, OSError):  # without a compiler, PyTorch writes
        build()  # before the guard watches: a server does it in the background
    seen: list[str] = []
    grammar, limits = Grammar(chance, list(CompletionRequest.model_fields)), Limits(**LIMITS)
    app = create_app(model, tokenizer, name="tiny", limits=limits)
    with listening(app, limits, log_level="critical") as address:
        watch(lambda event: None if "127.0.0.1" in event else seen.append(event), Path.cwd(), cache_folder())
        began = time.monotonic()
        found = asyncio.run(send(int(address.rpartition(":")[2]), number, grammar, wild))
        found["seconds"] = round(time.monotonic() - began, 1)
        deadline = time.monotonic() + limits.seconds
        while app.state.service.cost and time.monotonic() < deadline:
            time.sleep(0.1)
        if app.state.service.cost:
            found["problems"].append(f"requests that cost {app.state.service.cost} are still open")
    replies = found.pop("replies")
    found["replies compared"] = len(replies)
    found["problems"] += [f"not as alone: {form} {text!r}" for form, text in replies if alone(form) != text]
    found["problems"] += [f"guard: {event}" for event in dict.fromkeys(seen)]
    memory = found["memory"]
    if number >= 1000 and memory[-1] > 1.05 * memory[len(memory) // 2]:
        found["problems"].append(f"memory grew in the second half: {memory}")
    return found
