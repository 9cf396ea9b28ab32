"""The trainings that the scaling law is fitted to: `python scripts/scaling/sweep.py --shakespeare FILE`.

Each row of sweep.csv is one training from scratch: the kind and size of its text, the model, the recipe, and
the held-out bits per byte at its end. Cells that are in the file are not run again: the script resumes, and
--seconds ends it early.
"""

import argparse
import csv
import math
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gpt.config import GPTConfig
from gpt.data.builtin import python_docs, python_stdlib
from gpt.data.module import TokenData
from gpt.data.prepare import prepare_for
from gpt.data.shards import Prepared
from gpt.data.split import sample
from gpt.data.windows import EvalWindows
from gpt.files import atomic_write, cache_folder
from gpt.model import GPT
from gpt.plan.law import Trial
from gpt.plan.recommend import trial_steps
from gpt.plan.text import try_out
from gpt.training.device import cpu_multiplies_bfloat16, default_precision, keep_freed_memory
from gpt.training.loss import linear_cross_entropy
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.schedule import learning_rate_factor, learning_rates

TABLE = Path(__file__).with_name("sweep.csv")
HELD_OUT = 100_000  # bytes, the same for all cells of a kind
TRIAL = ("bits_per_byte", "earlier", "earlier_seen", "repeated", "table", "seen", "unique", "per_token")
RESULTS = ("parameters", "train_bytes", "bytes_per_token", "held_out_bytes_per_token", "passes")
RESULTS += (*(f"trial_{name}" for name in TRIAL), "bits_per_byte")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training; the defaults are the recipe that the law describes."""

    text: str
    text_bytes: int
    vocab_size: int
    context_length: int
    emb_dim: int
    num_layers: int
    steps: int
    batch_tokens: int = 1536
    rate: float = 1.0  # times the law's learning rates for width 128
    weight_decay: float = 0.4

    def seconds(self) -> float:
        """About how long a step takes on one core with bfloat16 instructions; only decides the steps."""
        products = 6 * (12 * self.num_layers * self.emb_dim**2 + self.vocab_size * self.emb_dim)
        return 0.006 + 0.003 * self.num_layers + products * self.batch_tokens / 1.2e11


def kinds(shakespeare: Path | None) -> dict[str, str]:
    """Each kind of text: the end of it is held out."""
    texts = {
        "python-docs": list(python_docs()),
        "python-stdlib": list(python_stdlib()),
    }
    for documents in texts.values():
        random.Random(0).shuffle(documents)
    joined = {name: "\n\n".join(documents) for name, documents in texts.items()}
    if shakespeare:
        joined["shakespeare"] = shakespeare.read_text("utf-8")
    return joined


def design() -> Iterator[Cell]:
    """One question at a time: vocabularies and shapes at equal compute, repeated text, the recipe."""
    texts = ("shakespeare", "python-docs", "python-stdlib")
    whole = 20_000_000

    def cell(text: str, size: int, shape: tuple[int, int], vocab: int, seconds: float, context: int) -> Cell:
        one = Cell(
            **{"text": text, "text_bytes": size, "vocab_size": vocab, "context_length": context, "steps": 1},
            **{"emb_dim": shape[0], "num_layers": shape[1]},
        )
        return replace(one, steps=max(30, round(seconds / one.seconds())))

    for vocab in (1024, 4096):  # at equal compute
        for text in texts:
            yield cell(text, whole, (128, 2), vocab, 12, 128)
    yield from _short_texts(texts)
    for text, size, shape, seconds in (  # the recipe: one change at a time
        *(("shakespeare", whole, (64, 2), 5), ("python-stdlib", whole, (192, 3), 8)),
        *(("python-docs", whole, (32, 1), 2), ("python-docs", 20_000, (64, 2), 4)),
        ("shakespeare", whole, (64, 2), 25),
    ):
        one = cell(text, size, shape, 1024, seconds, 64)
        yield one
        yield replace(one, rate=0.5)
        yield replace(one, rate=2.0)
        yield replace(one, batch_tokens=768, steps=one.steps * 2)
        yield replace(one, batch_tokens=3072, steps=max(20, one.steps // 2))
        yield replace(one, weight_decay=one.weight_decay / 4)
        yield replace(one, weight_decay=one.weight_decay * 2)
    for text, size, shape, vocab, steps in (  # many passes over longer texts
        *(("shakespeare", whole, (96, 1), 2048, 3000), ("shakespeare", whole, (192, 2), 2048, 1500)),
        *(("shakespeare", whole, (128, 2), 2048, 2200), ("python-docs", 500_000, (96, 1), 2048, 1500)),
        *(("python-stdlib", 1_000_000, (96, 1), 2048, 1800), ("shakespeare", 100_000, (64, 1), 512, 500)),
        *(("shakespeare", whole, (96, 2), 1024, 2200), ("python-docs", 1_000_000, (128, 2), 2048, 1500)),
    ):
        yield replace(cell(text, size, shape, vocab, 1, 64), steps=steps)
    for vocab in (512, 2048, 8192):  # at equal compute
        for text in texts:
            yield cell(text, whole, (128, 2), vocab, 12, 128)
    for text in texts:  # shapes, from small to large
        for shape, seconds in (((32, 1), 2), ((192, 3), 20), ((96, 2), 10)):
            yield cell(text, whole, shape, 2048, seconds, 64)
    for text in texts:  # longer
        for vocab in (1024, 4096, 2048, 8192):
            yield cell(text, whole, (128, 2), vocab, 50, 64)
    for text in texts:
        yield cell(text, whole, (64, 4), 2048, 12, 64)
        yield cell(text, whole, (256, 4), 2048, 60, 64)
        yield cell(text, whole, (64, 2), 512, 25, 256)
        yield cell(text, whole, (128, 4), 2048, 60, 32)
        yield cell(text, 200_000, (128, 4), 2048, 60, 64)


def _short_texts(texts: tuple[str, ...]) -> Iterator[Cell]:
    """Cells in which the text is the limit: it is read up to 64 times."""
    for size, shape, vocab, steps in (
        *((20_000, (64, 2), 1024, 24), (20_000, (64, 2), 1024, 96), (200_000, (64, 2), 1024, 150)),
        *((20_000, (32, 1), 512, 96), (20_000, (32, 1), 512, 384), (200_000, (128, 2), 2048, 250)),
        *((20_000, (128, 2), 1024, 96), (200_000, (64, 2), 512, 600), (200_000, (64, 2), 4096, 400)),
    ):
        for text in texts:
            yield Cell(
                **{"text": text, "text_bytes": size, "vocab_size": vocab, "context_length": 64},
                **{"emb_dim": shape[0], "num_layers": shape[1], "steps": steps},
            )


def measure(cell: Cell, corpus: Path, held_out: Path) -> dict[str, Any]:
    """Train as `gpt fit` does, without its Trainer, and score the held-out text."""
    torch.manual_seed(1337)
    data = TokenData(
        str(corpus),
        cell.vocab_size,
        cell.context_length,
        batch_size=cell.batch_tokens // cell.context_length,
        val_fraction=0.0,
        seed=1337,
        shift=True,
        vocabulary="learn",
    )
    width = cell.emb_dim
    config = GPTConfig(
        vocab_size=data.tokenizer.n_vocab,
        context_length=cell.context_length,
        emb_dim=width,
        num_heads=width // 32,
        num_layers=cell.num_layers,
    )
    model = GPT(config)
    warmup = min(50, cell.steps // 10)
    lr, rest_lr = (cell.rate * rate for rate in learning_rates(cell.steps, 128, 0))
    recipe = OptimizerConfig(
        lr=lr, rest_lr=rest_lr, weight_decay=cell.weight_decay, embedding_weight_decay=0.2
    )
    optimizer = build_optimizer(model, recipe, default_precision("cpu"))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, cell.steps, warmup, "linear")
    )
    precision = torch.autocast("cpu", torch.bfloat16) if cpu_multiplies_bfloat16() else nullcontext()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with precision:
            return linear_cross_entropy(model.features(x).flatten(0, 1), model.head.weight, y.flatten(), 1024)

    batches = data.train_dataloader().dataset
    for step in range(cell.steps):
        loss(*batches[step]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    with torch.no_grad():
        prepared = Prepared(prepare_for(data.tokenizer, str(held_out), val_fraction=0.0))
        windows = EvalWindows(prepared.stream("train"), cell.context_length, data.batch_size)
        batches_scored = (windows[number] for number in range(len(windows)))
        scored = [(float(loss(x, y)), int((y != -100).sum())) for x, y in batches_scored]
    nats = sum(mean * count for mean, count in scored)
    tokens_scored = sum(count for _, count in scored)
    trained = data.prepared.counts["train"]
    return {
        "parameters": model.num_parameters(),
        "train_bytes": trained.bytes,
        "bytes_per_token": trained.bytes / trained.tokens,
        "held_out_bytes_per_token": prepared.counts["train"].bytes / tokens_scored,
        "passes": cell.steps * cell.batch_tokens / trained.tokens,
        **columns(trial(corpus, held_out)),
        "bits_per_byte": nats / math.log(2) / prepared.counts["train"].bytes,
    }


def columns(trial: Trial) -> dict[str, Any]:
    """What the tables of the law keep of a trial; of its quarters four numbers in a cell."""
    found = {**vars(trial), **trial.numbers}
    for name in ("bits_per_byte", "earlier"):
        found[name] = " ".join(f"{value:.6g}" for value in found[name])
    return {f"trial_{name}": found[name] for name in TRIAL}


@cache
def trial(corpus: Path, held_out: Path) -> Trial:
    """How hard the text of a cell is."""
    train, val = (path.read_text("utf-8") for path in (corpus, held_out))
    return try_out(sample(train), sample(val), len(train.encode()), trial_steps(1))[0]


def corpus_of(cell: Cell, texts: dict[str, str]) -> tuple[Path, Path]:
    """Files of the first bytes, to learn from, and of the held-out end."""
    data = texts[cell.text].encode()
    size = min(cell.text_bytes, len(data) - HELD_OUT)
    paths = []
    for name, part in ((f"{size}", data[:size]), ("end", data[-HELD_OUT:])):
        path = cache_folder() / "sweep" / f"{cell.text}-{name}.txt"
        part = part.decode("utf-8", "ignore").encode()
        if not path.exists() or path.read_bytes() != part:
            with atomic_write(path, "wb") as file:  # not while another share reads it
                file.write(part)
        paths.append(path)
    return paths[0], paths[1]


def main() -> None:
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shakespeare", type=Path, help="the tinyshakespeare text")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so long")
    parser.add_argument(
        "--share", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="every Nth cell"
    )
    options = parser.parse_args()
    began = time.perf_counter()
    keep_freed_memory()
    texts = kinds(options.shakespeare)
    names = [field.name for field in fields(Cell)]
    for number, cell in enumerate(design()):
        if number % options.share[1] != options.share[0] or cell.text not in texts:
            continue
        if time.perf_counter() - began > options.seconds:
            return
        key = [str(value) for value in asdict(cell).values()]
        with TABLE.open(encoding="utf-8", newline="") as file:
            if key in ([row[name] for name in names] for row in csv.DictReader(file)):
                continue
        started = time.perf_counter()
        results = measure(cell, *corpus_of(cell, texts))
        cells = (results[name] for name in RESULTS)
        row = [*key, *(value if isinstance(value, str) else f"{value:.6g}" for value in cells)]
        with TABLE.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(row)
        print(
            f"{time.perf_counter() - started:.1f} s (about {cell.seconds() * cell.steps:.1f}) {row}",
            flush=True,
        )
    print("all cells are measured")


if __name__ == "__main__":
    main()
