"""`benchmark.py data`: tokenizing and windows beside other ways, memory, input wait."""

import os
import shutil
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
from benchmarks.common import Report, interleave, run_python, say, timed_rows
from torch.nn import functional as F

from gpt import GPT, GPTConfig, Tokenizer
from gpt.cores import cores
from gpt.data.builtin import python_stdlib
from gpt.data.module import TokenData, TrainLoader
from gpt.data.prepare import prepare
from gpt.data.prepared import Prepared
from gpt.data.windows import Grid, TrainWindows, WeightedBatch
from gpt.training.device import default_precision, keep_freed_memory

SHAPES = [(12, 128), (12, 1024), (64, 1024)]
"""Windows in a batch and tokens in a window: the quick run's, and two of a GPU's."""

# Linux's own peak; getrusage would include the memory of the parent process.
PEAK = r"""
import re, sys, time
from pathlib import Path
from gpt.data.prepare import prepare
began = time.perf_counter()
prepare(sys.argv[1], sys.argv[2], vocabulary=sys.argv[3])
seconds = time.perf_counter() - began
status = Path("/proc/self/status").read_text(encoding="utf-8")
print(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1e3, seconds)
"""


def run(quick: bool) -> Report:
    """Run all measurements. `quick` prepares tens of megabytes instead of gigabytes."""
    rounds = 3 if quick else 7
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["GPT_CACHE"] = str(folder / "cache")
        rows, ratio = tokenizing(folder, rounds)
        ratios = {"tokenize_vs_bare": ratio}
        slowest = []
        for batch_size, length in SHAPES:
            more, ratio = windows(folder / "out", batch_size, length, rounds)
            rows += more
            slowest.append(ratio)
        ratios["windows_vs_memmap"] = min(slowest)
        for size in (20, 60) if quick else (200, 2000):
            for vocabulary in ("gpt2", "learn:4096"):
                rows.append(peak_memory(folder, size, vocabulary))
        say("input wait")
        ratios["input_wait_fraction"] = input_wait(steps=40, rounds=rounds)
    return Report(
        title="Data",
        rows=rows,
        ratios=ratios,
        notes=[
            "Both tokenize the same files of the standard library with one thread a core; `gpt prepare` also "
            "reads and hashes them, and writes and checks the files. `windows_vs_memmap` is the lowest "
            "of the three shapes. `input_wait_fraction` is better when lower; the target is below 0.01."
        ],
    )


def tokenizing(folder: Path, rounds: int) -> tuple[list[dict[str, Any]], float]:
    """Text files to checked files of tokens, and tiktoken by itself on the same texts in memory."""
    say("tokenizing")
    threads = cores()  # as `prepare` takes
    texts = list(python_stdlib()) * 3
    source = folder / "library"
    source.mkdir()
    for number, text in enumerate(texts):
        (source / f"{number:05}.txt").write_bytes(text.encode())
    encoding = Tokenizer().encoding

    def ours() -> None:
        shutil.rmtree(folder / "out", ignore_errors=True)
        with redirect_stderr(StringIO()):
            prepare(str(source), folder / "out")

    def bare() -> None:
        encoding.encode_ordinary_batch(texts, num_threads=threads)

    taken = interleave({"gpt prepare": ours, "tiktoken, bare": bare}, rounds)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    rows = timed_rows(taken, megabytes, "a second", measured="tokenizing, MB")
    return rows, taken["gpt prepare"].times_faster_than(taken["tiktoken, bare"])


def windows(folder: Path, batch_size: int, length: int, rounds: int) -> tuple[list[dict[str, Any]], float]:
    """Batches from the loader, and from random slices of a memmap, on one core."""
    say(f"windows of {batch_size} x {length}")
    prepared = Prepared(folder)
    shard = folder / "train.bin"
    draw = np.random.default_rng(0)
    batches = max(20, 4_000_000 // (batch_size * length))
    grid = Grid(prepared.counts["train"].tokens, length)

    def ours() -> None:
        loader = TrainLoader(TrainWindows(prepared.stream("train"), grid, batch_size))
        left = batches
        while left:
            left -= sum(1 for _ in islice(loader, left))

    def memmap() -> None:
        for _ in range(batches):
            tokens = np.memmap(shard, prepared.dtype, mode="r")  # for each batch, as nanoGPT, to avoid a leak
            starts = draw.integers(len(tokens) - length, size=batch_size).tolist()
            for shift in (0, 1):
                rows = [tokens[i + shift : i + shift + length].astype(np.int64) for i in starts]
                torch.stack([torch.from_numpy(row) for row in rows])

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken = interleave({"loader": ours, "memmap slices": memmap}, rounds)
    torch.set_num_threads(threads)
    millions = batches * batch_size * length / 1e6
    rows = timed_rows(
        taken, millions, "a second", measured=f"windows {batch_size} x {length}, million tokens"
    )
    return rows, taken["loader"].times_faster_than(taken["memmap slices"])


def peak_memory(folder: Path, megabytes: int, vocabulary: str) -> dict[str, Any]:
    """Peak memory and speed of preparing so much of the standard library's source, repeated."""
    say(f"memory of preparing {megabytes} MB, {vocabulary}")
    library = "\n".join(python_stdlib()).encode()
    source = folder / "source"
    out = folder / "prepared"
    left = int(megabytes * 1e6)
    source.mkdir()
    for number in range(-(-left // len(library))):
        (source / f"{number:04}.txt").write_bytes(library[:left].decode(errors="ignore").encode())
        left -= len(library)
    peak, seconds = map(float, run_python(["-c", PEAK, str(source), str(out), vocabulary], folder).split())
    shutil.rmtree(source)
    shutil.rmtree(out)
    what = f"preparing {megabytes} MB, MB"
    return {"measured": what, "candidate": vocabulary, "a second": megabytes / seconds, "peak MB": peak}


def input_wait(steps: int, rounds: int) -> float:
    """The fraction of a training loop that waits for batches, with the quick run's model."""
    keep_freed_memory()  # as `gpt fit` does
    config = GPTConfig(  # of configs/quick.yaml
        vocab_size=4096, context_length=128, emb_dim=128, num_heads=4, num_layers=2, exact_gelu=True
    )
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = TokenData(
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        vocabulary="learn",
        batch_size=12,
        shift=True,
    )
    loader = data.train_dataloader()
    is_bfloat16 = default_precision("cpu") == "bf16-mixed"

    def measure() -> float:
        waited = 0.0
        batches = iter(loader)
        began = time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            assert not isinstance(batch, WeightedBatch), "only examples have weights"
            x, y = batch
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return waited / (time.perf_counter() - began)

    measure()
    return median(measure() for _ in range(rounds))
