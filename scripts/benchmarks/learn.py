"""`benchmark.py learn`: bits per byte reached in nanoGPT's training time.

First nanoGPT's documented CPU command on tinyshakespeare, unchanged; then configs/tinyshakespeare.yaml for
the same wall time, from the start of the process to its end; then for a sixth of that time. All train on the
first nine tenths of the text and are scored once, at the end, on the whole last tenth.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import Report, say

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "tinyshakespeare.yaml"
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


def run(quick: bool, nanogpt: Path, text: Path) -> Report:
    """Run both; `quick` shortens both, as a smoke test."""
    with tempfile.TemporaryDirectory() as folder:
        say("nanoGPT")
        theirs, their_seconds = _nanogpt(nanogpt.resolve(), text.resolve(), Path(folder), quick)
        whole = text.read_text(encoding="utf-8")
        cut = int(0.9 * len(whole))  # as nanoGPT splits it
        learned, held_out = Path(folder) / "first.txt", Path(folder) / "last.txt"
        learned.write_text(whole[:cut], encoding="utf-8")
        held_out.write_text(whole[cut:], encoding="utf-8")
        say("ours: a short run, for the speed")
        probe = 20 if quick else 300
        short, start_up = _ours(learned, held_out, Path(folder) / "probe", probe)[1:]
        a_step = (short - start_up) / probe
        rows = [{"run": "nanoGPT", "seconds": their_seconds, "bits per byte": theirs}]
        results = {}
        for name, budget in {
            "the same time": their_seconds,
            "a sixth of the time": their_seconds / 6,
        }.items():
            steps = max(10, int((0.97 * budget - start_up) / a_step))
            say(f"ours, {name}: {steps} steps")
            score, seconds, _ = _ours(learned, held_out, Path(folder) / f"steps-{steps}", steps)
            results[name] = score, seconds
            rows.append({"run": f"ours, {name}, {steps} steps", "seconds": seconds, "bits per byte": score})
    score, seconds = results["a sixth of the time"]
    reached = seconds if score <= theirs else results["the same time"][1]
    return Report(
        title="tinyshakespeare: bits per byte on the last tenth",
        rows=rows,
        ratios={
            "learn_bits_per_byte": results["the same time"][0],
            "learn_time_to_peer_fraction": reached / their_seconds,
        },
        bars={"lower is better": {str(row["run"]): float(str(row["bits per byte"])) for row in rows}},
        unit="bits per byte",
        notes=[
            "Seconds are whole processes, imports and tokenizing included. learn_bits_per_byte and "
            "learn_time_to_peer_fraction are better when lower."
        ],
    )


def _nanogpt(checkout: Path, text: Path, folder: Path, quick: bool) -> tuple[float, float]:
    """Bits per byte and seconds of nanoGPT's command, in a copy of the checkout."""
    copy = folder / "nanogpt"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    shutil.copy(text, copy / "data" / "shakespeare_char" / "input.txt")
    _python("data/shakespeare_char/prepare.py", copy)
    command = NANOGPT_COMMAND + (" --max_iters=50 --eval_interval=50" if quick else "")
    began = time.perf_counter()
    _python(command, copy)
    seconds = time.perf_counter() - began
    done = subprocess.run(
        [sys.executable, "-c", NANOGPT_SCORE],
        cwd=copy,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    return float(done.stdout.split()[-1]), seconds


def _ours(learned: Path, held_out: Path, folder: Path, steps: int) -> tuple[float, float, float]:
    """Bits per byte on `held_out`, seconds of the whole run, and seconds outside training."""
    folder.mkdir()
    options = f"--run r --data.val_fraction 0 --trainer.max_steps {steps} --trainer.limit_val_batches 0"
    environment = {"GPT_CACHE": str(folder / "cache")}
    began = time.perf_counter()
    _python(f"-m gpt.cli fit --config {CONFIG} --data.corpus {learned} {options}", folder, environment)
    seconds = time.perf_counter() - began
    training = json.loads((folder / "runs" / "r" / "summary.json").read_text(encoding="utf-8"))[
        "train_seconds"
    ]
    done = _python(f"-m gpt.cli evaluate --checkpoint runs/r --data {held_out}", folder, environment)
    score = json.loads(done)["bits_per_byte"]
    assert math.isfinite(score)
    return score, seconds, seconds - training


def _python(arguments: str, folder: Path, environment: dict[str, str] | None = None) -> str:
    """Run Python in `folder` and return what it prints."""
    merged = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    done = subprocess.run(  # noqa: PLW1510 - checked below
        [sys.executable, *arguments.split()],
        cwd=folder,
        env=merged,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise SystemExit(f"{arguments}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return done.stdout
