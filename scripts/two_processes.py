"""Do two processes train as one does? `python scripts/two_processes.py`, about forty minutes on two cores.

Two gloo processes on the CPU and one process make the same updates from the same micro-batches: the two have
half of them each. The one adds gradients, and with FSDP2 the squares of their norm, in the order in which the
two do (`add_as_two_do`), since float32 sums depend on it: the weights are then equal to the last bit. With
`--own-order` it adds as it always does. Every case compares the losses step by step and the last weights, and
some continue the run of two processes on one, and that one on two again. A case that is in the folder's
`processes.jsonl` is not repeated. Exit status 1: a difference was above its bound, or a command failed.
Needs POSIX.
"""

import argparse
import csv
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from faults.forked import run
from torch import Tensor

import gpt.run.fit  # noqa: F401 - so that a fork has imported it
from gpt.training import module as training
from gpt.training.module import LanguageModel
from gpt.weights.checkpoint import read

BOUND = 1e-5  # of losses, relative to them, and of weights, absolute
WINDOWS, CONTEXT = 9, 16
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 300
OPTIONS = [
    *("fit", "--data.corpus", "text.txt", "--trainer.logger", "csv", "--trainer.accelerator", "cpu"),
    *("--data.vocabulary", "null", "--model.config.vocab_size", "300"),
    *("--model.config.context_length", str(CONTEXT)),
    *("--model.config.emb_dim", "32", "--model.config.num_heads", "2", "--model.config.num_layers", "2"),
    *("--data.batch_size", str(WINDOWS), "--trainer.val_check_interval", "3", "--trainer.max_steps", "8"),
    *(
        "--model.config.dropout",
        "0",
        "--checkpoint_every",
        "3",
        "--keep_checkpoints",
        "9",
        "--log_every",
        "1",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    strategy: str
    optimizer: str
    accumulation: int
    precision: str
    compiled: bool
    recomputed: bool  # activation checkpointing
    change: bool = False  # from two processes to one to two

    def options(self) -> list[str]:
        """Those of the run, on any number of processes."""
        return [
            *OPTIONS,
            *("--model.optimizer.name", self.optimizer),
            *("--trainer.precision", self.precision),
            *("--data.tokens_per_update", str(2 * WINDOWS * self.accumulation * CONTEXT)),
            *("--model.compile", str(self.compiled).lower()),
            *("--model.checkpoint_activations", str(self.recomputed).lower()),
            # Compiled code for validation, which no row needs, would take as long again.
            *(("--trainer.limit_val_batches", "0") if self.compiled else ()),
        ]

    def passes(self, result: "Result") -> bool:
        """Whether the differences are within their bound; not a number never is."""
        return not result.error and result.losses <= BOUND and result.weights <= BOUND

    def reference(self) -> str:
        """The folder of the run on one process, which the case with a change shares."""
        parts = asdict(self) | {"change": False}
        return "-".join(map(str, ("one", *parts.values())))


@dataclass(frozen=True, kw_only=True)
class Result:
    """The largest differences from one process, or what went wrong."""

    losses: float
    weights: float
    error: str = ""


def cases() -> list[Case]:
    """Two against one, all combinations, and then the changes."""
    all_of = itertools.product(
        *(
            ("ddp", "fsdp2"),
            ("adamw", "muon"),
            (1, 4),
            ("32-true", "bf16-mixed"),
            (False, True),
            (False, True),
        )
    )
    names = "strategy", "optimizer", "accumulation", "precision", "compiled", "recomputed"
    plain: list[Any] = [Case(**dict(zip(names, values, strict=True))) for values in all_of]
    first = sorted(plain, key=lambda case: case.compiled)
    chosen = [case for case in plain if case.accumulation == 4 and not (case.compiled or case.recomputed)]
    return [*first, *(Case(**{**asdict(case), "change": True}) for case in chosen)]


def _short(strategy: str, optimizer: str, accumulation: int, precision: str, recomputed: bool) -> Case:
    return Case(
        strategy=strategy,
        optimizer=optimizer,
        accumulation=accumulation,
        precision=precision,
        compiled=False,
        recomputed=recomputed,
    )


SHORT = [
    _short("ddp", "adamw", 4, "32-true", recomputed=True),
    _short("ddp", "muon", 1, "bf16-mixed", recomputed=True),
    _short("fsdp2", "adamw", 1, "bf16-mixed", recomputed=False),
    _short("fsdp2", "muon", 4, "32-true", recomputed=False),
]


def add_as_two_do(strategy: str) -> None:
    """Let this process add up as two do: each one's micro-batches first; of FSDP2's norms each one's rows.

    Called in the process of the reference, before its command.
    """

    def separate(module: LanguageModel) -> None:
        """After a backward pass: keep the gradients of the two apart; at the end of the update add them."""
        of_an_update = module.trainer.accumulate_grad_batches
        number = module.trainer.fit_loop.epoch_loop.batch_idx % of_an_update
        if number == 0:
            module.halves = [{}, {}]
        half = module.halves[number % 2]
        for weight in filter(lambda weight: weight.grad is not None, module.parameters()):
            half[weight] = half[weight] + weight.grad if weight in half else weight.grad
            weight.grad = None
        if number == of_an_update - 1:
            for weight, gradient in module.halves[0].items():
                weight.grad = gradient + module.halves[1][weight]

    def norm_by_rows(gradients: list[Tensor]) -> Tensor:
        parts = [torch.stack([part.norm() for part in gradient.chunk(2)]) for gradient in gradients]
        return torch.stack([part.square().sum().sqrt() for part in parts]).norm()

    LanguageModel.on_after_backward = separate  # type: ignore[method-assign]
    if strategy == "fsdp2":
        training.get_total_norm = norm_by_rows  # type: ignore[attr-defined]


def measure(case: Case, folder: Path, own_order: bool = False) -> Result:
    """Run the case; the reference too, if it is not there yet."""

    def prepare(rank: int) -> None:
        if not own_order:
            add_as_two_do(case.strategy)

    one = folder / "runs" / case.reference()
    try:
        if not (one / "summary.json").is_file():
            shutil.rmtree(one, ignore_errors=True)
            train(folder, [*case.options(), "--run", one.name], "auto", 1, prepare)
        name = folder / "runs" / "two"
        shutil.rmtree(name, ignore_errors=True)
        train(folder, [*case.options(), "--run", "two"], case.strategy, 2)
        for step, processes in ((3, 1), (6, 2)) if case.change else ():
            strategy = case.strategy if processes == 2 else "auto"
            resume = ["fit", "--resume", f"runs/two/checkpoints/step-{step}.safetensors"]
            train(folder, resume, strategy, processes, prepare if processes == 1 else None)
    except RuntimeError as error:
        return Result(losses=float("nan"), weights=float("nan"), error=str(error))
    return compare(one, name)


def train(
    folder: Path,
    arguments: list[str],
    strategy: str,
    processes: int,
    prepare: Callable[[int], None] | None = None,
) -> None:
    """RuntimeError, with the end of its output, if a process fails."""
    where = ["--trainer.strategy", strategy, "--trainer.devices", str(processes)]
    ended = run(folder, [*arguments, *where], processes=processes, sabotage=prepare, kill_after=900.0)
    if any(ended.statuses):
        raise RuntimeError(f"{ended.statuses}: {ended.err[-1500:]}")


def compare(run: Path, other: Path) -> Result:
    """Losses of training and validation, step by step, and the last weights."""
    losses = _losses(run), _losses(other)
    states = [read(folder / "checkpoints" / "last.safetensors").weights for folder in (run, other)]
    if [step for step, _ in losses[0]] != [step for step, _ in losses[1]] or states[0].keys() != states[
        1
    ].keys():
        return Result(losses=float("nan"), weights=float("nan"), error="other steps, or other weights")
    pairs = zip(*losses, strict=True)
    return Result(
        losses=_largest([torch.tensor(other / loss - 1) for (_, loss), (_, other) in pairs]),
        weights=_largest(
            [
                states[1][name] - weight
                for name, weight in states[0].items()
                # It adds one number to a query's scores, which softmax removes: its gradient is rounding.
                if not name.endswith("W_key.bias")
            ]
        ),
    )


def _largest(differences: list[Tensor]) -> float:
    """Of their absolute values; not a number if one is none, which Python's `max` may overlook."""
    return float(torch.stack([difference.abs().max() for difference in differences]).max())


def _losses(run: Path) -> list[tuple[str, float]]:
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [(row["step"], float(row["train_loss"] or row["val_loss"])) for row in csv.DictReader(file)]


def table(results: dict[Case, Result]) -> str:
    """Markdown, a row for each strategy, optimizer, precision and accumulation: the worst of its cases."""
    lines = ["| | cases | losses, relative | weights, absolute | passed |", "| --- | --- | --- | --- | --- |"]
    rows: dict[str, list[tuple[Result, bool]]] = {}
    for case, result in results.items():
        what = "2, 1, 2 processes" if case.change else f"accumulation {case.accumulation}"
        key = f"{case.strategy}, {case.optimizer}, {case.precision}, {what}"
        rows.setdefault(key, []).append((result, case.passes(result)))
    for key, found in sorted(rows.items()):
        losses, weights = (max(getattr(one, of) for one, _ in found) for of in ("losses", "weights"))
        good = sum(passed for _, passed in found)
        lines.append(f"| {key} | {len(found)} | {losses:.1e} | {weights:.1e} | {good} of {len(found)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run what is not done, print each case and the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where runs and results are; new by default")
    parser.add_argument("--only", default="", help="cases whose text has this, such as optimizer='muon'")
    parser.add_argument("--own-order", action="store_true", help="let one process add in its own order")
    parser.add_argument("--short", action="store_true", help="four cases that have each value twice")
    options = parser.parse_args(arguments)
    folder: Path = options.folder or Path(tempfile.mkdtemp(prefix="processes-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    done, results = folder / "processes.jsonl", {}
    for line in done.read_text(encoding="utf-8").splitlines() if done.exists() else []:
        saved = json.loads(line)
        results[Case(**saved["case"])] = Result(**saved["result"])
    print(f"results in {done}", flush=True)
    torch.set_num_threads(1)
    for case in SHORT if options.short else cases():
        if case not in results and options.only in str(case):
            results[case] = measure(case, folder, options.own_order)
            with done.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": asdict(case), "result": asdict(results[case])}) + "\n")
            print("ok" if case.passes(results[case]) else "FAILED", case, results[case], flush=True)
    print(table(results))
    return int(not all(case.passes(result) for case, result in results.items()))


if __name__ == "__main__":
    sys.exit(main())
