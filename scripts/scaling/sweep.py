"""The trainings that the scaling law is fitted to: `python scripts/scaling/sweep.py --shakespeare FILE`.

Each row of sweep.csv is one training from scratch: the kind and size of its text, the model, the recipe, and
the held-out bits per byte at its end. Cells that are in the file are not run again: the script resumes, and
--seconds ends it early. The order of the cells is random, so that any part of them covers the whole range.
"""

import argparse
import csv
import math
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from gpt.config import GPTConfig
from gpt.data.builtin import python_docs, python_stdlib
from gpt.data.eval_windows import EvalWindows
from gpt.data.module import TokenData
from gpt.data.prepare import prepare_for
from gpt.data.shards import Prepared
from gpt.files import atomic_write, cache_folder
from gpt.model import GPT
from gpt.training.device import cpu_multiplies_bfloat16, keep_freed_memory
from gpt.training.loss import linear_cross_entropy
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.plan.text import compressed
from gpt.training.schedule import learning_rate_factor

TABLE = Path(__file__).with_name("sweep.csv")
HELD_OUT = 100_000  # bytes, the same for all cells of a kind
CELLS = 240
RESULTS = ("parameters", "train_bytes", "bytes_per_token", "passes", "compressed", "bits_per_byte")


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
    lr: float = 5e-3
    weight_decay: float = 0.4

    def seconds(self) -> float:
        """About how long a step takes on one core with bfloat16 instructions; only decides the steps."""
        products = 6 * (12 * self.num_layers * self.emb_dim**2 + self.vocab_size * self.emb_dim)
        return 0.006 + 0.003 * self.num_layers + products * self.batch_tokens / 1.2e11


def kinds(shakespeare: Path | None) -> dict[str, str]:
    """Each kind of text: the end of it is held out."""
    headers = sorted(Path(torch.__file__).parent.glob("include/torch/csrc/**/*.h"))
    texts = {
        "python-docs": list(python_docs()),
        "python-stdlib": list(python_stdlib()),
        "headers": [path.read_text("utf-8") for path in headers],
    }
    for documents in texts.values():
        random.Random(0).shuffle(documents)
    joined = {name: "\n\n".join(documents) for name, documents in texts.items()}
    if shakespeare:
        joined["shakespeare"] = shakespeare.read_text("utf-8")
    return joined


def design() -> Iterator[Cell]:
    """A random design over the kinds, sizes and shapes, then one change of the recipe at a time."""
    draw = random.Random(17)
    texts = ("python-docs", "shakespeare", "python-stdlib") * 3 + ("headers",)
    for number in range(CELLS):
        cell = Cell(
            text=texts[number % len(texts)],
            text_bytes=draw.choice((20_000, 60_000, 200_000, 600_000, 1_000_000, 2_000_000, 8_000_000)),
            vocab_size=draw.choice((512, 1024, 2048, 4096)),
            context_length=draw.choice((32, 64, 64, 128, 128, 256)),
            emb_dim=draw.choice((32, 64, 96, 128, 160, 192)),
            num_layers=draw.choice((1, 2, 3, 4, 6)),
            steps=1,
        )
        seconds = math.exp(draw.uniform(math.log(1.5), math.log(25)))
        if number % 15 == 14:
            seconds = 75
        cell = replace(cell, steps=round(min(4000, max(40, seconds / cell.seconds()))))
        yield cell
        if number % 12 == 11:  # the recipe: one change at a time
            yield replace(cell, lr=cell.lr / 2)
            yield replace(cell, lr=cell.lr * 2)
            yield replace(cell, weight_decay=cell.weight_decay / 4)
            yield replace(cell, weight_decay=cell.weight_decay * 2)
            yield replace(cell, batch_tokens=768, steps=cell.steps * 2)
            yield replace(cell, batch_tokens=3072, steps=max(20, cell.steps // 2))


def measure(cell: Cell, corpus: Path, held_out: Path) -> dict[str, float]:
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
    recipe = OptimizerConfig(
        lr=cell.lr, rest_lr=0.6 * cell.lr, weight_decay=cell.weight_decay, embedding_weight_decay=0.2
    )
    optimizer = build_optimizer(model, recipe)
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
    nats = sum(mean * tokens for mean, tokens in scored)
    tokens = len(data.prepared.stream("train"))
    return {
        "parameters": model.num_parameters(),
        "train_bytes": data.prepared.count("train", "bytes"),
        "bytes_per_token": data.bytes_per_token,
        "passes": cell.steps * cell.batch_tokens / tokens,
        "compressed": compressed(corpus.read_bytes()[:1_000_000]),
        "bits_per_byte": nats / math.log(2) / prepared.count("train", "bytes"),
    }


def corpus_of(cell: Cell, texts: dict[str, str]) -> tuple[Path, Path]:
    """Files of the first bytes, to learn from, and of the held-out end."""
    data = texts[cell.text].encode()
    size = min(cell.text_bytes, len(data) - HELD_OUT)
    paths = []
    for name, part in ((f"{size}", data[:size]), ("end", data[-HELD_OUT:])):
        paths.append(cache_folder() / "sweep" / f"{cell.text}-{name}.txt")
        with atomic_write(paths[-1], "wb") as file:
            file.write(part.decode("utf-8", "ignore").encode())
    return paths[0], paths[1]


def main() -> None:
    """Run the cells that are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shakespeare", type=Path, help="the tinyshakespeare text")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so long")
    options = parser.parse_args()
    began = time.perf_counter()
    keep_freed_memory()
    texts = kinds(options.shakespeare)
    rows = []
    if TABLE.exists():
        with TABLE.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    names = [field.name for field in fields(Cell)]
    done = {tuple(row[name] for name in names) for row in rows}
    for cell in design():
        if time.perf_counter() - began > options.seconds:
            return
        key = tuple(str(value) for value in asdict(cell).values())
        if cell.text not in texts or key in done:
            continue
        started = time.perf_counter()
        results = measure(cell, *corpus_of(cell, texts))
        rows.append({**dict(zip(names, key, strict=True)), **{n: f"{results[n]:.6g}" for n in RESULTS}})
        with atomic_write(TABLE) as file:
            writer = csv.DictWriter(file, [*names, *RESULTS], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"{time.perf_counter() - started:.1f} s (about {cell.seconds() * cell.steps:.1f}) {rows[-1]}")
    print("all cells are measured")


if __name__ == "__main__":
    main()
