"""`benchmark.py learn`: bits per byte reached in nanoGPT's training time.

First nanoGPT's documented CPU command on tinyshakespeare, unchanged; then configs/tinyshakespeare.yaml with
three seeds and as many steps as nanoGPT's wall time allows, from the start of the process to its end, with
the vocabulary learned in that time; then the same for 0.4 and 0.13 of that time. With `--nanochat DIR`,
nanochat too: its own tokenizer trainer, model, optimizer and schedule. All train on the first nine tenths
of the text and are scored once, at the end, on the whole last tenth. What nanoGPT prints on its way is
drawn as its curve.
"""

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import Report, run_python, say, with_package
from benchmarks.learn_nanochat import train_nanochat

from gpt.pictures.figures import save

# The README of nanoGPT, "i only have a macbook": a small GPT on a CPU.
NANOGPT_COMMAND = (
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
    "--log_interval=100 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
    "--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
# Reads the checkpoint as nanoGPT's sample.py does, and scores each character of the last tenth once.
NANOGPT_SCORE = """
import sys, torch, numpy as np
from torch.nn import functional as F
from model import GPT, GPTConfig
saved = torch.load("out-shakespeare-char/ckpt.pt", map_location="cpu", weights_only=False)
model = GPT(GPTConfig(**saved["model_args"]))
model.load_state_dict(saved["model"])
model.eval()
ids = torch.from_numpy(np.fromfile("data/shakespeare_char/val.bin", dtype=np.uint16).astype(np.int64))
nats, size = 0.0, saved["model_args"]["block_size"]
with torch.no_grad():
    for start in range(0, len(ids) - 1, size):
        x, y = ids[start : start + size][: len(ids) - 1 - start], ids[start + 1 : start + 1 + size]
        nats += F.cross_entropy(model(x[None], y[None])[0][0], y, reduction="sum").item()
print(nats / (len(ids) - 1) / np.log(2))
"""
SEEDS = (1337, 1338, 1339)
SHARES = (1.0, 0.4, 0.13)  # of nanoGPT's time
SHORT = 15.0  # seconds of training, for which the recipe is too slow to start; nothing is read twice
SHORT_RECIPE = (
    "--model.optimizer.warmup_steps 10 --model.optimizer.lr 1.2e-2 --model.optimizer.rest_lr 1.2e-2 "
    "--data.bpe_dropout 0"
)


class Trained(NamedTuple):
    """What a run reached, and how long its process took."""

    bits_per_byte: float
    seconds: float
    outside: float = 0.0  # the seconds before and after training


Curve = list[tuple[float, float]]
"""Seconds since the start of a process, and bits per byte."""


def run(
    quick: bool, nanogpt: Path, text: Path, nanochat: Path | None = None, chart: Path | None = None
) -> Report:
    """Run all of them; `quick` shortens each, as a smoke test."""
    seeds = SEEDS[:1] if quick else SEEDS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("nanoGPT")
        peer, curve = _nanogpt(nanogpt.resolve(), text.resolve(), folder, quick)
        whole = text.read_text(encoding="utf-8")
        cut = int(0.9 * len(whole))  # as nanoGPT splits it
        texts = folder / "first.txt", folder / "last.txt"
        texts[0].write_text(whole[:cut], encoding="utf-8")
        texts[1].write_text(whole[cut:], encoding="utf-8")
        runs = {"nanoGPT": [peer]}
        if nanochat:
            say("nanochat")
            other = train_nanochat(nanochat.resolve(), *texts, folder, 60.0 if quick else peer.seconds)
            runs["nanochat"] = [Trained(*other)]
        say("ours: a short run, for the time outside training")
        outside = _ours(*texts, folder / "short", 3, SEEDS[0]).outside
        for share in SHARES:
            name = f"ours, {share} of the time"
            say(name)
            where, budget = folder / f"{share}", share * peer.seconds
            runs[name] = [_within(budget, outside, texts, where, seed) for seed in seeds]
    mean = {name: statistics.fmean(one.bits_per_byte for one in found) for name, found in runs.items()}
    ours = {share: mean[f"ours, {share} of the time"] for share in SHARES}
    ratios = {"learn_bits_per_byte": ours[1.0]}
    if reached := [share for share, bits in ours.items() if bits <= peer.bits_per_byte]:
        ratios["learn_time_to_peer_fraction"] = min(reached)
    if nanochat:
        ratios["learn_bits_vs_nanochat"] = ours[1.0] / mean["nanochat"]
    rows = [_row(name, trained) for name, trained in runs.items()]
    title = f"{text.name}: bits per byte on the last tenth"
    if chart:
        draw(rows, curve, chart)
    return Report(
        title=title,
        rows=rows,
        ratios=ratios,
        notes=[
            "Seconds are whole processes, imports, tokenizing and learning the vocabulary included. "
            f"Ours: the longest time and the mean bits per byte of {len(seeds)} seeds. nanochat's "
            "compiler cache was filled by an earlier run. All ratios are better when lower."
        ],
    )


def _row(name: str, trained: list[Trained]) -> dict[str, Any]:
    """A line of the table: the longest of the runs and their mean."""
    bits = [run.bits_per_byte for run in trained]
    return {
        "run": name,
        "seconds": max(run.seconds for run in trained),
        "bits per byte": statistics.fmean(bits),
        "spread": f"{min(bits):.3f} to {max(bits):.3f}" if len(bits) > 1 else "",
    }


def draw(rows: list[dict[str, Any]], curve: Curve, path: Path) -> None:
    """Bits per byte against seconds: nanoGPT's curve, a point for nanochat, and ours for several times."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.subplots()
    points = {row["run"]: (row["seconds"], row["bits per byte"]) for row in rows}
    ours = sorted(point for name, point in points.items() if name.startswith("ours"))
    blue, grey, orange = "#0072B2", "#666666", "#D55E00"
    axes.plot(*zip(*curve, strict=True), "-", color=grey, label="nanoGPT, one run with its own validations")
    axes.plot(*points["nanoGPT"], "s", color=grey, markersize=8)
    if "nanochat" in points:
        axes.plot(*points["nanochat"], "D", color=orange, markersize=8, label="nanochat, at its end")
    axes.plot(
        *zip(*ours, strict=True), "o-", color=blue, markersize=8, label="ours, each point a run of its own"
    )
    for seconds, bits in [points[name] for name in points if not name.startswith("ours")] + ours:
        label = f"{bits:.2f}"
        axes.annotate(label, (seconds, bits), xytext=(0, 9), ha="center", textcoords="offset points")
    axes.set(xlabel="seconds of the whole process", ylabel="held-out bits per byte (lower is better)")
    axes.set_xlim(left=0)
    axes.set_ylim(top=1.4 * points["nanoGPT"][1])  # its first validation is far above
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)


def _nanogpt(checkout: Path, text: Path, folder: Path, quick: bool) -> tuple[Trained, Curve]:
    """nanoGPT's command, in a copy of the checkout: its result, and its validations on the way."""
    copy = folder / "nanogpt"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    shutil.copy(text, copy / "data" / "shakespeare_char" / "input.txt")
    run_python(["data/shakespeare_char/prepare.py"], copy)
    command = NANOGPT_COMMAND + (" --max_iters=50 --eval_interval=50" if quick else "")
    curve: Curve = []
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-u", *command.split()],
        cwd=copy,
        env=with_package(),
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if told := re.match(r"step \d+: train loss [\d.]+, val loss ([\d.]+)", line):
                curve.append((time.perf_counter() - began, float(told[1]) / log(2)))
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"nanoGPT ended with status {process.returncode}")
    done = run_python(["-c", NANOGPT_SCORE], copy, {"PYTHONPATH": str(copy)})
    return Trained(float(done.split()[-1]), seconds), curve


def _within(budget: float, outside: float, texts: tuple[Path, Path], folder: Path, seed: int) -> Trained:
    """A run of ours that takes no longer than `budget`, from the start of its process to its end."""
    limit = max(2.0, 0.99 * budget - outside)
    while True:
        trained = _ours(*texts, folder, limit, seed)
        if trained.seconds <= budget or limit <= 2.0:
            return trained
        limit = max(2.0, limit - (trained.seconds - 0.99 * budget))


def _ours(learned: Path, held_out: Path, folder: Path, limit: float, seed: int) -> Trained:
    """Train for `limit` seconds and score `held_out`; nothing is cached from another run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = {"GPT_CACHE": str(folder / "cache")}
    command = f"fit --config tinyshakespeare --data.corpus {learned} --run r --seed_everything {seed}"
    command += f" --data.val_fraction 0 --trainer.max_steps -1 --trainer.max_time {limit:.2f}s"
    command += f" {SHORT_RECIPE}" if limit < SHORT else ""
    began = time.perf_counter()
    run_python(["-m", "gpt", *command.split()], folder, environment)
    seconds = time.perf_counter() - began
    summary = json.loads((folder / "runs" / "r" / "summary.json").read_text(encoding="utf-8"))
    score = ["-m", "gpt", "evaluate", "--checkpoint", "runs/r", "--data", str(held_out)]
    bits = json.loads(run_python(score, folder, environment))["bits_per_byte"]
    return Trained(bits, seconds, seconds - summary["train_seconds"])
