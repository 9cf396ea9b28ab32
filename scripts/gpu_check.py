"""Check this program on a GPU, in about thirty minutes: `python scripts/gpu_check.py --json gpu.json`.

Compares losses, gradients and logits with the CPU in float64, looks for host synchronisation, compares texts
and resumed runs, trains briefly in every strategy, precision and size, serves, and measures the speed of
training and generation. Prints a table, which lists what could not run with the reason. The exit status is 1
if a check failed or was not reached in time.

Where a machine is lent for a few minutes at a time, `--checks training,sizes --minutes 8` does a part. The
report is written after each case, so one that is killed leaves what it has found. A command that could not
have its time any more is not begun, and what runs ends with this program.

`--dry-run` takes the same path on the CPU with tiny models, to see that the script itself works.
"""

import argparse
import copy
import csv
import gc
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package need not be installed

import torch
from benchmarks.common import listening, machine, peak_flops, say, with_package
from faults.fingerprint import fingerprint
from scale import flops_per_token
from torch import Tensor
from torch.nn import functional as F

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.files import write_json
from gpt.generation import Engine, Request, Sampling, for_decoding
from gpt.generation.decoding import decoder_of
from gpt.training.compilation import compile_model, missing_compiler
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig, build_optimizer

ROOT = Path(__file__).parents[1]
COMMAND_SECONDS = 180.0
"""The most time of one `gpt` command: the longest compile GPT-2 XL, or train the quick run."""
OUT_OF_TIME = "out of time"
NOT_IN_DRY_RUN = "left out of the dry run"
SHAPE = {"vocab_size": 300, "context_length": 16, "emb_dim": 32, "num_heads": 2, "num_layers": 1}
TINY = GPTConfig(**SHAPE)


class OutOfTime(Exception):
    """There is not enough time for a command."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the report."""

    case: str
    passed: bool | None
    """None for a measurement without a limit, and for what this machine cannot run."""
    measured: dict[str, float] = field(default_factory=dict)
    not_run: str = ""
    """Why the case could not run."""
    check: str = ""

    @property
    def verdict(self) -> str:
        if self.not_run:
            return f"not run: {self.not_run}"
        return {True: "ok", False: "FAILED", None: "measured"}[self.passed]

    @property
    def figures(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in self.measured.items())


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run of `gpt fit` left."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return found

    def column(self, name: str) -> list[float]:
        """A column of metrics.csv, where it is not empty."""
        with (self.folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
            return [float(row[name]) for row in csv.DictReader(file) if row[name]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where and how much to check."""

    device: str
    dry: bool
    folder: Path
    deadline: float

    @property
    def gpus(self) -> int:
        return torch.cuda.device_count() if self.device == "cuda" else 1

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[object]:
        return torch.autocast(self.device, dtype) if dtype else nullcontext()

    def gpt(
        self, *arguments: str, without_gpu: bool = False, sabotage: Callable[[int], None] | None = None
    ) -> None:
        """Run the `gpt` command in the folder. In a dry run `sabotage` is called in its process.

        Raises:
            OutOfTime: it was not begun, as it could not have its time.
            RuntimeError: it failed; the message has the end of its output.
        """
        if self.deadline - time.monotonic() < COMMAND_SECONDS:
            raise OutOfTime
        environment = {"CUDA_VISIBLE_DEVICES": ""} if without_gpu else {}
        if self.dry:  # a fork needs no imports
            from faults.forked import run

            ended = run(self.folder, list(arguments), environment=environment, sabotage=sabotage)
            status, err = ended.status, ended.err
        else:
            command = [sys.executable, "-m", "gpt.cli", *arguments]
            status, err = run_alone(command, self.folder, with_package(environment))
        if status:
            raise RuntimeError(f"gpt {' '.join(arguments[:6])}: status {status}: {err[-500:]}")

    def fit(
        self, name: str, config: str, steps: int, *more: str, sabotage: Callable[[int], None] | None = None
    ) -> Run:
        """Train with configs/`config`.yaml for so many steps, fewer in a dry run; the rest as for `gpt`."""
        options = [f"--config={ROOT / 'configs' / config}.yaml", "--trainer.limit_val_batches=0"]
        options += ["--data.corpus=python-docs", "--data.val_fraction=0.01", "--log_every=2", "--run", name]
        options += [f"--trainer.accelerator={self.device}", "--trainer.logger=csv", *more]
        if self.dry:
            options += [f"--model.config.{key}={value}" for key, value in SHAPE.items()]
            options += ["--data.corpus=text.txt", "--model.compile=false"]
        self.gpt("fit", *options, f"--trainer.max_steps={4 if self.dry else steps}", sabotage=sabotage)
        return Run(folder=self.folder / "runs" / name)


def run_alone(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Status and stderr of a command and of all processes that it starts, none of which is left."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, err = process.communicate(timeout=COMMAND_SECONDS)
            return process.returncode, err
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)


# By precision: autocast type, TF32, and the relative error allowed.
PRECISIONS: dict[str, tuple[torch.dtype | None, bool, float]] = {
    "fp32": (None, False, 1e-4),
    "tf32": (None, True, 1e-2),
    "bf16": (torch.bfloat16, True, 6e-2),
    "fp16": (torch.float16, True, 1e-2),
}
SCALE = 1024.0  # keeps small float16 gradients from becoming zero


def precision(plan: Plan) -> Iterator[Row]:
    """Loss, gradients and logits of every precision, compiled and not, against float64 on the CPU."""
    config = TINY if plan.dry else GPTConfig(context_length=256)
    torch.manual_seed(0)
    model = GPT(config)
    x, y = torch.randint(0, config.vocab_size, (2, 2, config.context_length))
    exact = copy.deepcopy(model).double()
    logits = exact(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in exact.parameters()])
    missing = NOT_IN_DRY_RUN if plan.dry else missing_compiler(torch.device(plan.device))
    for (name, (dtype, tf32, limit)), compiled in product(PRECISIONS.items(), (False, True)):
        case = f"{name}, compiled" if compiled else name
        if compiled and missing:
            yield Row(case=case, passed=None, not_run=missing)
            continue
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch._dynamo.reset()  # with more than eight variants of a block it would compile no further one
        module = LanguageModel(config, OptimizerConfig(name="adamw"))
        module.model.load_state_dict(model.state_dict())
        module.to(plan.device)
        if compiled:
            compile_model(module)
        scale = SCALE if dtype is torch.float16 else 1.0
        with plan.autocast(dtype):
            found = module.loss((x.to(plan.device), y.to(plan.device)))
            with torch.no_grad():
                theirs = module.model(x.to(plan.device))
        (found * scale).backward()
        flat = torch.cat([parameter.grad.double().flatten() for parameter in module.model.parameters()])
        measured = {
            "loss": abs(found.item() / loss.item() - 1),
            "gradients": relative(flat / scale, gradient),
            "logits": relative(theirs, logits.detach()),
        }
        passed = all(value < limit for value in measured.values())
        yield Row(case=case, passed=passed, measured=measured)


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the norm of `expected`."""
    return float((found.double().cpu() - expected).norm() / expected.norm())


def synchronisation(plan: Plan) -> Iterator[Row]:
    """An update of two micro-batches must not make the host wait for the GPU."""
    config = TINY if plan.dry else GPTConfig(context_length=256)
    for name in ("adamw", "muon"):
        module = LanguageModel(config, OptimizerConfig(name=name)).to(plan.device)
        optimizer = build_optimizer(module.model, module.options.optimizer)
        batch = torch.randint(0, config.vocab_size, (2, 2, config.context_length), device=plan.device)
        for detecting in (False, True):
            if detecting and plan.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(2):
                    with plan.autocast(torch.bfloat16):
                        loss = module.loss((batch[0], batch[1]))
                    loss.backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
                optimizer.step()
                optimizer.zero_grad()
            finally:
                if plan.device == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
        detects = plan.device == "cuda"
        yield Row(case=name, passed=detects or None, not_run="" if detects else "the detector needs CUDA")


SAMPLINGS = {
    "greedy": [Sampling(temperature=0)],
    "top-p": [Sampling(top_p=0.9)],
    "several": [Sampling(), Sampling(top_k=5), Sampling(repetition_penalty=1.1)],
}


def write(engine: Engine, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
    """Texts of several lengths, so that rows leave and memory grows."""
    texts = []
    for row, prompt in enumerate(prompts):
        how: Any = {"sampling": samplings[row % len(samplings)], "seed": row}
        texts += engine.add(Request(tokens=prompt, max_new_tokens=20 + 17 * row, **how))
    for _ in engine.run():
        pass
    return [text.tokens for text in texts]


def generation(plan: Plan) -> Iterator[Row]:
    """Greedy ids equal the CPU's; CUDA graphs change no token, also in two threads; waits; speed."""
    config, new = (TINY, 4) if plan.dry else (GPTConfig(), 64)
    torch.manual_seed(0)
    model = GPT(config).eval()
    prompts = torch.randint(0, config.vocab_size, (8, min(32, config.context_length // 2)))
    options: dict[str, Any] = {"max_new_tokens": new, "temperature": 0}
    expected = generate(model, prompts, **options)
    half = model.to(plan.device)
    torch.set_float32_matmul_precision("highest")
    same = torch.equal(generate(half, prompts.to(plan.device), **options).cpu(), expected)
    yield Row(case="greedy ids equal the CPU's", passed=same)
    half, rows = half if plan.dry else half.bfloat16(), prompts.tolist()
    for case, samplings in SAMPLINGS.items():
        alone = write(Engine(half, graphs=False), rows, samplings)
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(write, [Engine(half), Engine(half)], [rows] * 2, [samplings] * 2))
        count = sum(bool(one) for cache in decoder_of(half).caches for one in cache.recorded.values())
        passed = found == [alone, alone] and (plan.dry or count > 0)
        yield Row(case=f"graphs change no token, {case}", passed=passed, measured={"graphs": count})
    if plan.device == "cuda":
        yield waits(half, rows)
    else:
        yield Row(case="waits of the host", passed=None, not_run="the detector needs CUDA")
    for batch in (1, 8):
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            generate(half, rows[:batch], **options)  # ids on the host, so the GPU has finished
            seconds.append(time.perf_counter() - began)
        speed = {"tokens/s": batch * new / statistics.median(seconds[1:]), "first call s": seconds[0]}
        yield Row(case=f"batch {batch}", passed=None, measured=speed)


def waits(model: GPT, prompts: list[list[int]]) -> Row:
    """The host waits once for eight tokens of all texts."""
    engine = Engine(model)
    for row in prompts:
        engine.add(Request(tokens=row, max_new_tokens=49, sampling=Sampling(top_p=0.9), seed=0))
    for _ in range(4):  # the prompts, and until a graph is recorded
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    count = sum("synchronizing" in str(wait.message) for wait in caught)
    return Row(case="waits of the host", passed=count == 1, measured={"waits for 8 tokens": count})


def resuming(plan: Plan) -> Iterator[Row]:
    """A resumed run equals the uninterrupted one: always in the deterministic mode, and on a CPU."""
    for mode, compiled in (("true", "false"), ("false", "false"), ("true", "true")):
        case = f"deterministic {mode}, compiled {compiled}"
        how = (f"--trainer.deterministic={mode}", f"--model.compile={compiled}")
        how += ("--model.config.dropout=0.1", "--model.optimizer.schedule=constant")
        whole = plan.fit(f"whole {case}", "quick", 40, *how, "--checkpoint_every=2", "--keep_checkpoints=99")
        resumed = plan.folder / "runs" / f"resumed {case}"
        shutil.copytree(whole.folder, resumed)
        half = resumed / "checkpoints" / f"step-{2 if plan.dry else 20}.safetensors"
        (resumed / "checkpoints" / "last.safetensors").unlink()
        plan.gpt("fit", "--resume", str(half))
        equal = fingerprint(whole.folder)[0] == fingerprint(resumed)[0]
        must = mode == "true" or plan.device == "cpu"
        yield Row(case=case, passed=equal if must else None, measured={"equal": equal})


def checkpoint(plan: Plan) -> Iterator[Row]:
    """A checkpoint of the device is read where there is none."""
    plan.fit("read", "quick", 4)
    plan.gpt("generate", "--checkpoint", "runs/read", "--prompt", "The", without_gpu=True)
    yield Row(case="read on the CPU", passed=True)


def strategies(plan: Plan) -> Iterator[Row]:
    """DDP on all GPUs, with accumulated gradients, trains as one process does."""
    for optimizer in ("adamw", "muon"):
        recipe = ("--trainer.accumulate_grad_batches=2", f"--model.optimizer.name={optimizer}")
        alone = plan.fit(
            f"one-{optimizer}", "quick", 20, *recipe, "--data.batch_size=16", "--trainer.devices=1"
        )
        options = ("--trainer.strategy=ddp", f"--trainer.devices={plan.gpus}")
        options += (f"--data.batch_size={16 // plan.gpus}",)
        found = plan.fit(f"ddp-{optimizer}", "quick", 20, *recipe, *options)
        pairs = zip(found.column("train_loss"), alone.column("train_loss"), strict=True)
        worst = max(abs(a / b - 1) for a, b in pairs)
        case = f"ddp, {optimizer}, {plan.gpus} processes"
        yield Row(case=case, passed=worst < 0.01, measured={"loss": worst})


def float16(plan: Plan) -> Iterator[Row]:
    """Trains in float16 with a scaled loss, as GPUs without bfloat16 do; a CPU takes bfloat16 instead."""
    for optimizer in ("adamw", "muon"):
        how = ("--trainer.precision=16-mixed", f"--model.optimizer.name={optimizer}")
        first, *_, last = plan.fit(f"float16-{optimizer}", "quick", 100, *how).column("train_loss")
        passed = math.isfinite(last) and (plan.dry or last < first - 1)
        yield Row(case=optimizer, passed=passed, measured={"first loss": first, "last loss": last})


def lack_memory(_: int) -> None:
    """Let batches of more than four windows not fit, in a forked process."""
    fits = LanguageModel.loss

    def loss(module: LanguageModel, batch: tuple[Tensor, ...]) -> Tensor:
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("as if there were no memory")
        return fits(module, batch)

    LanguageModel.loss = loss  # type: ignore[method-assign]


def memory(plan: Plan) -> Iterator[Row]:
    """A micro-batch that does not fit is halved until one does, and the run trains with that."""
    most, context = (16, TINY.context_length) if plan.dry else (480, 1024)  # needs about 300 GB
    update = (f"--data.batch_size={most}", f"--data.tokens_per_update={most * context}")
    short = ("--trainer.devices=1", "--model.compile=false")
    run = plan.fit("memory", "gpt2-small", 1, *update, *short, sabotage=lack_memory)
    saved = (run.folder / "config.yaml").read_text(encoding="utf-8")
    (found,) = (int(line.split()[1]) for line in saved.splitlines() if line.startswith("  batch_size:"))
    yield Row(case="search", passed=0 < found < most, measured={"windows": found})


def serving(plan: Plan) -> Iterator[Row]:
    """Eight requests at once over HTTP get the texts that each gets alone; on a GPU rounding may differ."""
    if not find_spec("fastapi"):
        yield Row(case="all", passed=None, not_run="the extra serve is not installed")
        return
    from gpt.serve.app import create_app

    torch.manual_seed(0)
    tokenizer = Tokenizer("gpt2", TINY.vocab_size) if plan.dry else Tokenizer()
    model = for_decoding(GPT(TINY if plan.dry else GPTConfig()).eval().to(plan.device))
    with listening(create_app(model, tokenizer, name="random")) as address:

        def ask(n: int) -> str:
            form = {"prompt": list(range(n + 1)), "max_tokens": 4 if plan.dry else 64, "temperature": 0}
            kind, where = {"content-type": "application/json"}, f"{address}/v1/completions"
            request = urllib.request.Request(where, json.dumps(form).encode(), kind)
            with urllib.request.urlopen(request, timeout=COMMAND_SECONDS) as answer:
                return str(json.load(answer)["choices"][0]["text"])

        alone = [ask(n) for n in range(8)]
        began = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(ask, range(8)))
        seconds = time.perf_counter() - began
    same = sum(one == other for one, other in zip(alone, together, strict=True))
    passed = same == 8 if plan.device == "cpu" else same >= 1
    yield Row(case="eight at once", passed=passed, measured={"equal": same, "s": seconds})


# By case: the file of configs/, and further options. Compiled or not: which quick run takes less time in all?
TRAININGS = {
    "gpt2-small": ("gpt2-small", "--model.compile=true"),
    "the model as a whole": ("gpt2-small", "--model.compile=whole"),
    "AdamW": ("gpt2-small", "--model.compile=true", "--model.optimizer.name=adamw"),
    "deterministic": ("gpt2-small", "--model.compile=true", "--trainer.deterministic=true"),
    "not compiled": ("gpt2-small", "--model.compile=false"),
    "quick, compiled": ("quick", "--model.compile=true"),
    "quick, not compiled": ("quick", "--model.compile=false"),
}


def training(plan: Plan) -> Iterator[Row]:
    """`gpt fit`: half of the peak with GPT-2 small, 575,000 tokens a second on an H100, is the goal."""
    for case, (config, *options) in TRAININGS.items():
        small = ("--data.batch_size=1", "--data.tokens_per_update=32") if plan.dry else ()
        steps, began = 2000 if config == "quick" else 24, time.perf_counter()
        run = plan.fit(case, config, steps, "--trainer.devices=1", *options, *small)
        summary = run.summary
        speed = statistics.median(
            run.column("tokens_per_second")[1 if plan.dry else 2 :]
        )  # the first compile
        measured = {"tokens/s": speed, "peak GB": summary["peak_memory_bytes"] / 1e9}
        measured["whole command s"] = time.perf_counter() - began
        if config != "quick" and plan.device == "cuda":
            peak = peak_flops("bf16")
            measured |= {"MFU": speed * flops_per_token(GPTConfig()) / peak} if peak else {}
        shutil.rmtree(run.folder)
        yield Row(case=case, passed=summary["steps"] == (4 if plan.dry else steps), measured=measured)


def sizes(plan: Plan) -> Iterator[Row]:
    """The first updates of GPT-2's larger sizes, each with its own configuration."""
    small = ("--data.batch_size=2", "--data.tokens_per_update=32") if plan.dry else ()
    for name in list(GPTConfig.names())[1:]:
        run = plan.fit(name, name, 2, *small)
        summary = run.summary
        shutil.rmtree(run.folder)  # the largest checkpoint takes 13 GB
        measured = {"tokens/s": summary["tokens_per_second"], "peak GB": summary["peak_memory_bytes"] / 1e9}
        yield Row(case=name, passed=summary["steps"] > 0, measured=measured)


# What is right comes before what is fast, since a slow machine may not reach the last ones.
CHECKS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "precision": precision,
    "synchronisation": synchronisation,
    "generation": generation,
    "resuming": resuming,
    "checkpoint": checkpoint,
    "strategies": strategies,
    "float16": float16,
    "memory": memory,
    "serving": serving,
    "training": training,
    "sizes": sizes,
}


def run_all(plan: Plan, names: list[str], report: Callable[[list[Row]], None]) -> list[Row]:
    """The checks of these names. One that raises becomes a row; no case begins after the deadline.

    `report` gets the rows after each of them.
    """
    rows: list[Row] = []
    for name in names:
        say(f"{name}: {(CHECKS[name].__doc__ or '').strip()}")
        found, ended = CHECKS[name](plan), False
        while not ended:
            try:
                if time.monotonic() > plan.deadline:
                    raise OutOfTime
                row = next(found)
            except StopIteration:
                break
            except OutOfTime:
                row, ended = Row(case="the rest", passed=False, not_run=OUT_OF_TIME), True
            except Exception as error:  # a check that cannot run must not end the others
                traceback.print_exc()
                why = " ".join(str(error).split())[:200]
                row, ended = Row(case=type(error).__name__, passed=False, not_run=why), True
            rows.append(replace(row, check=name))
            say(f"  {row.case}: {row.verdict} {row.figures}")
            report(rows)
        del found  # with the processes of a case that was not ended
        gc.collect()
        if plan.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def main() -> int:
    """Run the checks and print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="take the same path on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.add_argument("--checks", default=",".join(CHECKS), help="some of %(default)s")
    parser.add_argument("--minutes", type=float, default=30, help="no case begins after so many minutes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    names = options.checks.split(",")
    if unknown := ", ".join(name for name in names if name not in CHECKS):
        parser.error(f"there is no check {unknown}, expected some of {', '.join(CHECKS)}")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("this machine has no GPU that PyTorch can use; --dry-run takes the CPU")
    began, device = time.monotonic(), "cpu" if options.dry_run else "cuda"
    said = {"machine": machine(), "dry_run": options.dry_run}

    def report(rows: list[Row]) -> None:
        if options.json:
            found = [{**asdict(row), "verdict": row.verdict} for row in rows]
            write_json(options.json, {**said, "rows": found})

    with tempfile.TemporaryDirectory() as name:
        folder, deadline = Path(name), began + 60 * options.minutes
        os.environ["GPT_CACHE"] = str(folder / "cache")
        if options.dry_run:
            torch.set_num_threads(1)
            import gpt.run.fit  # noqa: F401 - once, before the runs are forked

            (folder / "text.txt").write_text("A fox jumps over the dog.\n" * 400, encoding="utf-8")
        plan = Plan(device=device, dry=options.dry_run, folder=folder, deadline=deadline)
        rows = run_all(plan, names, report)
    print("| check | case | result | measured |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row.check} | {row.case} | {row.verdict} | {row.figures} |")
    failed = [row for row in rows if row.passed is False]
    print(f"\n{len(rows)} cases, {len(failed)} failed or not reached, {time.monotonic() - began:.0f} seconds")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
