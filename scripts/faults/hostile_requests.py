"""Hostile requests beside good ones: `python -m faults.hostile_requests 10000`, as `torture.py` starts it.

A grammar over the schema of /v1/completions makes bodies with values of every kind for every field. Others
are not JSON or not HTTP. Some arrive slowly, are read slowly, or are cut off. Good requests with greedy
decoding are sent all along: their replies must equal those of an idle server. Prints JSON with counts and
problems.

Needs a process of its own, because the server is a thread.
"""

import asyncio
import json
import math
import random
import resource
import statistics
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from benchmarks.serve import listening
from faults.watched import watch

from gpt import GPT, GPTConfig, Tokenizer
from gpt.errors import InputError
from gpt.files import cache_folder
from gpt.generation import for_decoding
from gpt.generation.build import build
from gpt.serve.app import create_app
from gpt.serve.limits import Limits
from gpt.serve.requests import CompletionRequest

CLIENTS = 24
PATIENCE = 40.0
"""Seconds after which a request without an answer counts as hung; the server itself gives up earlier."""
LIMITS = Limits(
    running=8, seconds=20, read_seconds=4, last_seconds=1, connections=128, new_tokens=64,
    cost=1 << 13, body_bytes=1 << 18,
)  # fmt: skip
GOOD = [
    {"prompt": [7 * i + j for j in range(3 * i + 1)], "max_tokens": 12, "temperature": 0} for i in range(1, 9)
]


class Grammar:
    """Makes requests as bytes."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.fields = list(CompletionRequest.model_fields)

    def value(self, depth: int = 0) -> Any:
        """Any JSON value: plain, at a limit, of another type, or nested."""
        choice = self.chance.choice
        plain = choice((
            *(None, True, False, 0, 1, -1, 2, 16, 64, 65, 300, 10**6, 2**31, 2**63, 2**64, 10**400),
            *(0.0, -0.0, 0.5, 1.0, 1e-50, 1e-40, 1e-6, 1e300, -1e300, math.inf, -math.inf, math.nan),
            *("", "x", "a b", "<|endoftext|>", "\x00", "\ud83d", "\u202e", "é" * 50, "y" * 5000, "1"),
        ))  # fmt: skip
        if depth > 3 or self.chance.random() < 0.6:
            return plain
        size = choice((0, 1, 2, 5, 20, 2000 if depth == 0 else 3))
        if self.chance.random() < 0.5:
            return [self.value(depth + 1) for _ in range(size)]
        return {
            f"k{i}" if i else choice(("include_usage", "1", "299")): self.value(depth + 1)
            for i in range(size)
        }

    def form(self) -> dict[str, Any]:
        """A body of the schema with some fields replaced."""
        form: dict[str, Any] = {
            "prompt": self.chance.choice(("Once", [1, 2, 3], ["a", "b"], [[5], [6, 7]])),
            "max_tokens": self.chance.randint(0, 24),
        }
        form |= {"stream": True} if self.chance.random() < 0.4 else {}
        for name in self.chance.sample(self.fields, self.chance.choice((0, 1, 1, 1, 2, 3))):
            form[name] = self.value()
        if self.chance.random() < 0.05:
            form[self.chance.choice(("__class__", "Prompt", "x" * 500, "_"))] = self.value()
        return form

    def body(self) -> bytes:
        """JSON of a form, or something that is none."""
        lot = self.chance.random()
        if lot < 0.85:
            return json.dumps(self.form()).encode("utf-8", "surrogatepass")
        text = json.dumps(self.form()).encode("utf-8", "surrogatepass")
        return self.chance.choice(
            (
                b"",
                text[: self.chance.randrange(len(text))],
                self.chance.randbytes(self.chance.randint(1, 200)),
                b"[" * 50_000,
                b'{"a":' * 20_000,
                b"[" + b"[]," * 60_000 + b"[]]",
                b'{"prompt": [' + b"[]," * 60_000 + b"[]]}",
                b'{"logit_bias": {' + b",".join(b'"%d": 1' % i for i in range(20_000)) + b"}}",
                b'{"prompt": "a", "prompt": [1], "max_tokens": 1}',
                b'{"prompt": "\\ud800\\udfff\\ud83d"}',
                b"\xef\xbb\xbf" + text,
                b"\xff\xfe" + text,
                b'{"max_tokens": ' + b"9" * 5000 + b"}",
                b"x" * (LIMITS.body_bytes + 1),
            )
        )

    def request(self) -> bytes:
        """A whole HTTP request."""
        choice = self.chance.choice
        body = self.body()
        path = "/v1/completions"
        if self.chance.random() < 0.15:
            path = choice((
                *("/attention", "/v1/chat/completions", "/v1/models/%00", "/v1/models/../../etc/passwd"),
                *("/metrics", "//evil.example/", "/%2e%2e/%2e%2e/etc/passwd", "/" + "a" * 5000, "/?x=%ff"),
                *("*", "/", "/health"),
            ))  # fmt: skip
        method = (
            "POST" if self.chance.random() < 0.95 else choice(("GET", "PUT", "DELETE", "BREW", "OPTIONS", ""))
        )
        headers = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(body))}
        headers["Connection"] = "close"
        if self.chance.random() < 0.1:
            name, value = choice((
                *(("Content-Length", "-1"), ("Content-Length", "9" * 30), ("Content-Length", "0x10")),
                *(("Content-Length", str(len(body) + 9)), ("Content-Length", str(len(body) // 2))),
                *(("Content-Type", "text/html"), ("Content-Type", "multipart/form-data")),
                *(("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "gzip")),
                *(("Authorization", "Bearer " + "x" * 9000), ("X" * 3000, "y"), ("Upgrade", "websocket")),
                *(("Host", "evil.example"), ("Expect", "100-continue")),
            ))  # fmt: skip
            headers[name] = value
        head = f"{method} {path} HTTP/1.{choice((1, 1, 1, 1, 0, 9))}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return head.encode("utf-8", "surrogatepass") + b"\r\n" + body


async def hostile(port: int, data: bytes, manner: str, chance: random.Random) -> tuple[str, str | None]:
    """Send one hostile request in a hostile manner: what became of it, and what is wrong, or None."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if manner == "slow writer":
            for start in range(0, min(len(data), 2000), 100):
                writer.write(data[start : start + 100])
                await writer.drain()
                await asyncio.sleep(0.3)
        elif manner == "cut off":
            writer.write(data[: chance.randrange(len(data))] if chance.random() < 0.5 else data)
            await writer.drain()
            await asyncio.sleep(chance.uniform(0.0, 0.1))
            return "cut off", None
        else:
            writer.write(data)
            await writer.drain()
        if manner == "slow reader":
            await reader.read(20)
            await asyncio.sleep(1.5)
        answer = await reader.read()
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed by the server", None
    finally:
        writer.close()
    if manner == "slow reader":
        return "slow reader", None
    status = int(answer[9:12]) if answer[:5] == b"HTTP/" and answer[9:12].isdigit() else 0
    if (status >= 500 and status not in (501, 503, 504)) or b"Traceback" in answer:
        return "server error", f"{status}: {data[:600]!r} -> {answer[-300:]!r}"
    if status == 200 and (b'"internal_error"' in answer or b"NaN" in answer):
        return "server error", f"{data[:600]!r} -> {answer[-300:]!r}"
    kinds = {0: "closed by the server", 1: "answered", 2: "answered", 3: "refused", 4: "refused", 5: "busy"}
    return kinds[status // 100], None


async def good(port: int, form: dict[str, Any]) -> str | None:
    """The text that a good request gets; None if the server is busy."""
    body = json.dumps(form).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        answer = await reader.read()
    finally:
        writer.close()
    if answer[9:12] == b"503":
        return None
    if answer[9:12] != b"200":
        return f"refused: {answer[:400]!r}"
    text: str = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
    return text


async def attack(port: int, number: int, chance: random.Random) -> dict[str, Any]:
    """Send `number` hostile requests and a tenth as many good ones; counts, problems, and memory in MB."""
    expected = [await good(port, form) for form in GOOD]
    counts: Counter[str] = Counter()
    problems: list[str] = []
    memory: list[float] = []
    grammar = Grammar(chance)
    left = iter(range(number))

    async def client() -> None:
        for i in left:
            data = grammar.request()
            manner = chance.choices(("at once", "slow writer", "slow reader", "cut off"), (80, 5, 5, 10))[0]
            try:
                if i % 10 == 0:
                    which = (i // 10) % len(GOOD)
                    text = await asyncio.wait_for(good(port, GOOD[which]), PATIENCE)
                    counts["good, equal" if text == expected[which] else "good, server busy"] += 1
                    if text not in (None, expected[which]):
                        problems.append(f"a good reply changed: {expected[which]!r} -> {text!r}")
                kind, problem = await asyncio.wait_for(hostile(port, data, manner, chance), PATIENCE)
            except TimeoutError:
                kind, problem = "hung", f"no answer within {PATIENCE:.0f} s, {manner}: {data[:600]!r}"
            except OSError as error:
                kind, problem = "no connection", str(error)
            counts[kind] += 1
            problems.extend([problem] if problem else [])
            if (i + 1) % max(1, number // 10) == 0:
                memory.append(resident())
                print(
                    f"\rhostile request: {i + 1} of {number}, {len(problems)} lost ", end="", file=sys.stderr
                )

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    await asyncio.sleep(LIMITS.read_seconds + LIMITS.last_seconds)
    for form, text in zip(GOOD, expected, strict=True):
        if await good(port, form) != text:
            problems.append("a good reply differs after the attack")
    return {"counts": counts, "problems": problems, "memory": memory}


def resident() -> float:
    """Memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> int:
    """Serve a tiny model, attack it, and print what was found."""
    number, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=300, context_length=32, emb_dim=32, num_heads=2, num_layers=1)
    app = create_app(for_decoding(GPT(config)), Tokenizer("gpt2", vocab_size=300), name="tiny", limits=LIMITS)
    with suppress(InputError, OSError):  # without a compiler, PyTorch writes
        build()  # before the guard watches: a server does it in the background
    seen: list[str] = []
    with listening(app, LIMITS, log_level="critical") as address:
        port = int(address.rpartition(":")[2])
        watch(lambda event: None if "127.0.0.1" in event else seen.append(event), Path.cwd(), cache_folder())
        began = time.monotonic()
        found = asyncio.run(attack(port, number, random.Random(seed)))
        found["seconds"] = round(time.monotonic() - began, 1)
        deadline = time.monotonic() + LIMITS.seconds
        while app.state.engine.open and time.monotonic() < deadline:
            time.sleep(0.1)
        found["open at the end"] = app.state.engine.open
    found["problems"] += [f"guard: {event}" for event in dict.fromkeys(seen)]
    memory = found["memory"]
    if number >= 1000 and statistics.fmean(memory[-3:]) > 1.05 * statistics.fmean(memory[4:7]):
        found["problems"].append(f"memory grew in the second half: {memory}")
    if found["open at the end"]:
        found["problems"].append(f"{found['open at the end']} requests are still open")
    print(json.dumps(found))
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
