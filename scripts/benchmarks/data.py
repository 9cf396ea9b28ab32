"""`benchmark.py data`: tokenizing and windows beside other ways, memory, start-up, input wait."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr
from io import StringIO
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from benchmarks.common import Report, Timing, interleave, say
from torch.nn import functional as F

from gpt import GPT, GPTConfig, Tokenizer
from gpt.data.builtin import python_stdlib
from gpt.data.module import TokenData, TrainLoader
from gpt.data.prepare import prepare
from gpt.data.shards import FILES, INDEX_DTYPE, META, Prepared
from gpt.data.windows import Grid, TrainWindows
from gpt.files import write_json
from gpt.plain import as_dict

SHAPES = [(12, 128), (12, 1024), (64, 1024)]
"""Windows in a batch and tokens in a window: the quick run's, and two of a GPU's."""

# Linux's own peak; getrusage would include the memory of the parent process.
PEAK = r"""
import re, sys, time
from pathlib import Path
from gpt.data.corpus import find_corpus
from gpt.data.prepare import prepare
from gpt.data.split import Divided
from gpt.text.vocabulary import Learned, learn
import tokenizers
began = time.perf_counter()
if sys.argv[2].startswith("learn:"):
    learn(Divided(find_corpus(sys.argv[1])).to_learn_from(), Learned(n_vocab=int(sys.argv[2][6:])))
else:
    prepare(sys.argv[1], sys.argv[2])
seconds = time.perf_counter() - began
status = Path("/proc/self/status").read_text(encoding="utf-8")
print(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1e3, seconds)
"""

START = """
import sys, time
import torch, lightning.pytorch
began = time.perf_counter()
from gpt.data.module import TokenData
data = TokenData(sys.argv[1], vocab_size=50257, context_length=1024, batch_size=12)
data.prepare_data()
data.setup("fit")
batch = next(iter(data.train_dataloader()))
print(time.perf_counter() - began)
"""


def run(quick: bool) -> Report:
    """Run all measurements. `quick` prepares tens of megabytes instead of gigabytes."""
    rounds = 3 if quick else 7
    rows: list[dict[str, Any]] = []
    bars: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}

    def add(what: str, value: float, unit: str, spread: float = 0.0) -> None:
        rows.append({"measured": what, "value": value, "unit": unit, "spread %": round(100 * spread, 1)})

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["GPT_CACHE"] = str(folder / "cache")
        say("tokenizing")
        megabytes, timings = tokenizing(folder, 3, rounds)
        ratios["tokenize_vs_bare"] = timings["gpt prepare"].times_faster_than(timings["tiktoken, bare"])
        bars["tokenizing, MB/s"] = {}
        for contender, timing in timings.items():
            bars["tokenizing, MB/s"][contender] = megabytes / timing.median
            add(f"tokenizing, {contender}", megabytes / timing.median, "MB/s", timing.spread)
        slowest = []
        for batch_size, length in SHAPES:
            say(f"windows of {batch_size} x {length}")
            tokens, timings = windows(folder / "out", batch_size, length, rounds)
            slowest.append(timings["loader"].times_faster_than(timings["memmap slices"]))
            group = f"windows {batch_size} x {length}, million tokens/s"
            bars[group] = {}
            for contender, timing in timings.items():
                speed = bars[group][contender] = tokens / 1e6 / timing.median
                add(f"windows {batch_size} x {length}, {contender}", speed, "M tokens/s", timing.spread)
        ratios["windows_vs_memmap"] = min(slowest)
        for size in (20, 60) if quick else (200, 2000):
            say(f"memory of preparing {size} MB")
            peak, seconds = peak_memory(folder, size)
            add(f"peak memory of preparing {size} MB", peak, "MB")
            add(f"time of preparing {size} MB", seconds, "s")
        for size in (1, 20) if quick else (1, 200, 1000):
            say(f"learning a vocabulary of 4,096 from {size} MB")
            peak, seconds = peak_memory(folder, size, learned=4096)
            add(f"peak memory of learning 4,096 tokens from {size} MB", peak, "MB")
            add(f"time of learning 4,096 tokens from {size} MB", seconds, "s")
        say("start on ten billion tokens")
        add("first batch of ten billion tokens", start(folder, 10**10), "s")
        say("input wait")
        ratios["input_wait_fraction"] = input_wait(steps=40, rounds=rounds)
        add("input wait, quick config", 100 * ratios["input_wait_fraction"], "% of the step")
    return Report(
        title="Data",
        rows=rows,
        ratios=ratios,
        bars=bars,
        unit="more is better",
        notes=[
            "Both tokenize the same files of the standard library with one thread a core; `gpt prepare` also "
            "reads and hashes them, and writes and checks the shards. `windows_vs_memmap` is the lowest "
            "of the three shapes. `input_wait_fraction` is better when lower; the target is below 0.01."
        ],
    )


def tokenizing(folder: Path, copies: int, rounds: int) -> tuple[float, dict[str, Timing]]:
    """Text files to checked shards, and tiktoken alone on the same texts in memory; also the size in MB."""
    threads = os.cpu_count() or 1
    texts = list(python_stdlib()) * copies
    source = folder / "library"
    source.mkdir()
    for number, text in enumerate(texts):
        (source / f"{number:05}.txt").write_bytes(text.encode())
    encoding = Tokenizer().encoding
    with redirect_stderr(StringIO()):
        own = Prepared(prepare(str(source), folder / "own", vocabulary="learn:4096")).tokenizer

    def ours() -> None:
        shutil.rmtree(folder / "out", ignore_errors=True)
        with redirect_stderr(StringIO()):
            prepare(str(source), folder / "out")

    def bare() -> None:
        encoding.encode_ordinary_batch(texts, num_threads=threads)

    def learned() -> None:
        own.encoding.encode_ordinary_batch(texts, num_threads=threads)

    contenders = {"gpt prepare": ours, "tiktoken, bare": bare, "tiktoken, bare, learned vocabulary": learned}
    timings = interleave(contenders, rounds)
    return sum(len(text.encode()) for text in texts) / 1e6, timings


def windows(folder: Path, batch_size: int, length: int, rounds: int) -> tuple[int, dict[str, Timing]]:
    """Batches from the loader, and from random slices of a memmap, on one core; also the number of tokens."""
    prepared = Prepared(folder)
    shard = folder / "train.bin"
    batches = max(20, 4_000_000 // (batch_size * length))
    draw = np.random.default_rng(0)
    grid = Grid(prepared.count("train", "tokens"), length)

    def ours() -> None:
        loader = TrainLoader(TrainWindows(prepared.stream("train"), grid, batch_size))
        left = batches
        while left:
            left -= sum(1 for _ in islice(loader, left))

    def memmap() -> None:
        for _ in range(batches):
            tokens = np.memmap(
                shard, prepared.dtype, mode="r"
            )  # opened for each batch, as nanoGPT does to avoid a leak
            starts = draw.integers(len(tokens) - length, size=batch_size).tolist()
            torch.stack([torch.from_numpy(tokens[i : i + length].astype(np.int64)) for i in starts])
            torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + length].astype(np.int64)) for i in starts])

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    timings = interleave({"loader": ours, "memmap slices": memmap}, rounds)
    torch.set_num_threads(threads)
    return batches * batch_size * length, timings


def peak_memory(folder: Path, megabytes: int, learned: int = 0) -> tuple[float, float]:
    """Peak MB and seconds of preparing `megabytes` MB, or of learning `learned` tokens from it.

    The text is the standard library's source, repeated. To learn from, the lines of each copy are in another
    order, as the sample is chosen by hash.
    """
    library = "\n".join(python_stdlib()).encode()
    source, out, size = folder / f"{megabytes}MB", folder / f"{megabytes}MB-out", int(megabytes * 1e6)
    source.mkdir()
    for number in range(-(-size // len(library))):
        text = library[: size - number * len(library)]
        if learned:
            lines = text.splitlines(keepends=True)
            random.Random(number).shuffle(lines)
            text = b"".join(lines)
        (source / f"{number:04}.txt").write_bytes(text)
    peak, seconds = child(PEAK, source, f"learn:{learned}" if learned else out).split()
    shutil.rmtree(source)
    shutil.rmtree(out, ignore_errors=True)
    return float(peak), float(seconds)


def start(folder: Path, tokens: int) -> float:
    """Seconds from start to the first batch of `tokens` tokens, in sparse files, which read as zeros."""
    (folder / "tiny.txt").write_text("some text\n" * 100, encoding="utf-8")
    meta = Prepared(prepare(str(folder / "tiny.txt"), folder / "tiny")).meta
    huge = folder / "huge"
    huge.mkdir()
    sizes = {"train.bin": tokens * 2, "train-documents.bin": tokens // 700 * INDEX_DTYPE.itemsize}
    for name in FILES:
        with open(huge / name, "wb") as file:
            file.truncate(sizes.get(name, 0))
    meta.splits["train"] |= {"tokens": tokens, "documents": tokens // 700}
    meta.splits["val"] |= {"tokens": 0, "documents": 0}
    write_json(huge / META, as_dict(meta))
    return float(child(START, huge))


def input_wait(steps: int, rounds: int) -> float:
    """The fraction of a training loop that waits for batches, with the quick run's model."""
    model = GPT(GPTConfig(vocab_size=2048, context_length=128, emb_dim=128, num_heads=4, num_layers=4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = TokenData(vocab_size=2048, context_length=128, batch_size=12, shift=True).train_dataloader()

    def measure() -> float:
        waited, batches, began = 0.0, iter(loader), time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            x, y = next(batches)
            waited += time.perf_counter() - asked
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return waited / (time.perf_counter() - began)

    measure()
    return median(measure() for _ in range(rounds))


def child(code: str, *arguments: Path | str) -> str:
    """The output of `code` in a new Python process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
