"""Check this program on a GPU, in about thirty minutes: `python scripts/gpu_check.py --json gpu.json`.

Compares losses, gradients and logits with the CPU in float64, looks for host synchronisation, compares texts
and resumed runs, trains briefly in every precision and size and with DDP, serves, and measures the speed of
training and generation. Prints a table. The exit status is 1 if a case failed or was not begun in time.

Where a machine is lent for a few minutes at a time, `--checks training,sizes --minutes 8` does a part. Each
case has its own time: one that no longer fits is not begun, and the next that fits is. The report is written
after each case, so a program that is killed leaves what it has found, and what it runs ends with it.

`--dry-run` takes the same path on the CPU with tiny models, to see that the script itself works.
"""

import argparse
import copy
import csv
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package need not be installed

import torch
from benchmarks.common import listening, machine, peak_flops, say, with_package
from faults import forked
from faults.fingerprint import fingerprint
from lightning.pytorch import Callback
from scale import flops_per_token
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.files import write_json
from gpt.generation import Engine, Request, Sampling, for_decoding
from gpt.run import fit
from gpt.run.lightning_private import silence_warnings
from gpt.run.start import start
from gpt.training import guard
from gpt.training.compilation import compile_model
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig

ROOT = Path(__file__).parents[1]
SHAPE = {"vocab_size": 300, "context_length": 16, "emb_dim": 32, "num_heads": 2, "num_layers": 1}
Measured = dict[str, float]


class Needs(Exception):
    """What a case needs and this machine does not have."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device and the folder of a case, and the time by which it has to end."""

    device: str
    folder: Path
    until: float
    """On `time.monotonic`'s clock."""

    @property
    def dry(self) -> bool:
        return self.device == "cpu"

    def config(self, context_length: int = 1024) -> GPTConfig:
        return GPTConfig.from_dict(SHAPE) if self.dry else GPTConfig(context_length=context_length)

    def gpt(self, *words: str, **environment: str) -> None:
        """Run the `gpt` command in the folder; a RuntimeError with the end of its output if it fails."""
        if self.dry:  # a fork needs no imports
            ended = forked.run(self.folder, list(words), environment=environment)
            status, err = ended.status, ended.err
        else:
            command = [sys.executable, "-m", "gpt", *words]
            status, err = run_alone(command, self.folder, with_package(environment), self.seconds_left)
        if status:
            raise RuntimeError(f"gpt {' '.join(words[:6])}: status {status}: {err[-500:]}")

    def fit(self, name: str, config: str, steps: int, *more: str) -> Path:
        """Train with configs/`config`.yaml for so many steps, fewer in a dry run: the run's folder."""
        run = self.folder / "runs" / name
        shutil.rmtree(run, ignore_errors=True)  # of another case: `gpt fit` would take NAME-2
        self.gpt(*self.words_to_fit(name, config, steps, *more))
        return run

    def words_to_fit(self, name: str, config: str, steps: int, *more: str) -> list[str]:
        """The command that does."""
        options = [f"--config={config}", "--data.corpus=python-docs", "--data.val_fraction=0"]
        options += ["--log_every=2", f"--trainer.accelerator={self.device}"]
        options += ["--trainer.logger=csv", "--run", name, *more]
        if self.dry:
            options += [f"--model.config.{key}={value}" for key, value in SHAPE.items()]
            options += ["--data.corpus=text.txt", "--model.compile=false"]
        return ["fit", *options, f"--trainer.max_steps={4 if self.dry else steps}"]

    @property
    def seconds_left(self) -> float:
        """The seconds that the case may still take."""
        return self.until - time.monotonic()


def run_alone(
    command: list[str], folder: Path, environment: dict[str, str], seconds: float
) -> tuple[int, str]:
    """Status and stderr of a command and of all processes that it starts, none of which is left.

    A TimeoutExpired if it takes more seconds.
    """
    how: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **how) as process:
        try:
            _, err = process.communicate(timeout=max(seconds, 0))
            return process.returncode, err
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)


def column(run: Path, name: str) -> list[float]:
    """A column of metrics.csv, where it is not empty."""
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the norm of `expected`."""
    return float((found.double().cpu() - expected).norm() / expected.norm())


def gradient_of(model: nn.Module) -> Tensor:
    """The gradients of all parameters in one vector; each has to have one."""
    gradients = []
    for parameter in model.parameters():
        assert parameter.grad is not None, "a parameter has no gradient"
        gradients.append(parameter.grad.flatten())
    return torch.cat(gradients)


@cache
def exact(config: GPTConfig) -> tuple[GPT, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A model, two batches of ids, and its loss, gradient and logits in float64."""
    torch.manual_seed(0)
    model = GPT(config)
    x, y = torch.randint(0, config.vocab_size, (2, 2, config.context_length))
    double = copy.deepcopy(model).double()
    logits = double(x)
    loss = cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    return model, x, y, loss.detach(), gradient_of(double), logits.detach()


def precision(place: Place, dtype: torch.dtype | None, tf32: bool, limit: float) -> Measured:
    """Loss, gradients and logits, compiled on a GPU and not, against float64 on the CPU."""
    config = place.config(context_length=256)
    measured: Measured = {}
    model, x, y, loss, gradient, logits = exact(config)
    x, y = x.to(place.device), y.to(place.device)
    for kind in ("",) if place.dry else ("", "compiled "):
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch._dynamo.reset()  # with more than eight variants of a block it would compile no further one
        module = LanguageModel(config, OptimizerConfig(name="adamw"))
        module.model.load_state_dict(model.state_dict())
        module.to(place.device)
        if kind:
            compile_model(module)
        scale = 1024.0 if dtype is torch.float16 else 1.0  # keeps small gradients from becoming zero
        with torch.autocast(place.device, dtype) if dtype else nullcontext():
            found = module.loss((x, y))
            with torch.no_grad():
                theirs = module.model(x)
        (found * scale).backward()
        measured |= {f"{kind}loss": relative(found.detach(), loss), f"{kind}logits": relative(theirs, logits)}
        measured[f"{kind}gradients"] = relative(gradient_of(module.model).double() / scale, gradient)
    assert max(measured.values()) < limit, measured
    return measured


def forbid_waiting(forbidden: bool) -> bool:
    """Whether to wait for the GPU is an error, from now on: whether it was before."""
    if not torch.cuda.is_available():
        return False
    before = torch.cuda.get_sync_debug_mode() > 0
    torch.cuda.set_sync_debug_mode("error" if forbidden else "default")
    return before


class NoWaiting(Callback):
    """Makes it an error to wait for the GPU in a run's third and fourth update, between them too."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            forbid_waiting(True)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            forbid_waiting(False)


@contextmanager
def reading_allowed() -> Iterator[list[Tensor]]:
    """Lets the guard wait for the flags that it reads, once an update: those that it has read."""
    read = guard.read
    seen: list[Tensor] = []

    def reading(flags: Tensor) -> list[int]:
        seen.append(flags)
        before = forbid_waiting(False)
        try:
            return read(flags)
        finally:
            forbid_waiting(before)

    guard.read = reading
    try:
        yield seen
    finally:
        guard.read = read


def synchronisation(place: Place, name: str) -> Measured:
    """An update of two micro-batches, as `gpt fit` makes it, waits for the GPU only for the guard's flags.

    The run is the program's own, with its Trainer, its clipping and what it does between two batches; it
    records, validates and saves nothing in the updates that are watched.
    """
    how = (f"--model.optimizer.name={name}", "--trainer.accumulate_grad_batches=2", "--snapshot_megabytes=0")
    words = place.words_to_fit(f"waiting-{name}", "quick", 6, *how)
    words += ["--log_every=99", "--trainer.max_steps=6"]
    silence_warnings()
    here = Path.cwd()
    os.chdir(place.folder)
    try:
        training = fit.assemble(start("fit", words[1:]))
        callbacks: list[Callback] = vars(training.trainer)["callbacks"]  # Lightning does not declare them
        callbacks.append(NoWaiting())
        with reading_allowed() as flags:
            training.fit()
    finally:
        forbid_waiting(False)
        os.chdir(here)
    assert len(flags) == 6, f"the guard has read {len(flags)} times in 6 updates"
    if place.dry:
        raise Needs("a GPU")
    return {}


def written(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Texts of several lengths, so that rows leave and memory grows, drawn in several ways."""
    ways = [Sampling(temperature=0), Sampling(top_p=0.9), Sampling(top_k=5), Sampling(repetition_penalty=1.1)]
    texts = []
    for row, prompt in enumerate(prompts):
        how: Any = {"sampling": ways[row % len(ways)], "seed": row}
        texts += engine.add(Request(tokens=prompt, max_new_tokens=20 + 17 * row, **how))
    for _ in engine.run():
        pass
    return [text.tokens for text in texts]


def generation(place: Place) -> Measured:
    """Greedy ids equal the CPU's; two engines in two threads; speed."""
    config, new = place.config(), 4 if place.dry else 64
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    model = GPT(config).eval()
    prompts = torch.randint(0, config.vocab_size, (8, min(32, config.context_length // 2))).tolist()
    options: dict[str, Any] = {"max_new_tokens": new, "temperature": 0}
    expected = generate(model, prompts, **options)
    model.to(place.device)
    assert generate(model, prompts, **options) == expected, "greedy ids differ from the CPU's"
    model = model if place.dry else model.bfloat16()
    alone = written(Engine(model), prompts)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(written, [Engine(model), Engine(model)], [prompts] * 2))
    assert found == [alone, alone], "two threads change tokens"
    measured = {}
    for batch in (1, 8):
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            generate(model, prompts[:batch], **options)  # ids on the host, so the GPU has finished
            seconds.append(time.perf_counter() - began)
        measured[f"tokens/s, batch {batch}"] = batch * new / statistics.median(seconds[1:])
    return measured


def resuming(place: Place, deterministic: str, compiled: str) -> Measured:
    """A resumed run equals the uninterrupted one: always in the deterministic mode, and on a CPU."""
    name = f"whole-{deterministic}-{compiled}"
    how = [f"--trainer.deterministic={deterministic}", f"--model.compile={compiled}"]
    how += ["--model.config.dropout=0.1", "--model.optimizer.schedule=constant"]
    whole = place.fit(name, "quick", 40, *how, "--checkpoint_every=2", "--keep_checkpoints=99")
    resumed = place.folder / "runs" / f"resumed-{name}"
    shutil.copytree(whole, resumed)
    (resumed / "checkpoints" / "last.safetensors").unlink()
    place.gpt("fit", "--resume", str(resumed / "checkpoints" / f"step-{2 if place.dry else 20}.safetensors"))
    equal = fingerprint(whole)[0] == fingerprint(resumed)[0]
    assert equal or (deterministic == "false" and not place.dry), "the resumed run differs"
    return {"equal": equal}


def checkpoint(place: Place) -> Measured:
    """A checkpoint of the device is read where there is none."""
    place.fit("read", "quick", 4)
    place.gpt("generate", "--checkpoint", "runs/read", "--prompt", "The", CUDA_VISIBLE_DEVICES="")
    return {}


def ddp(place: Place, backend: str, processes: int, optimizer: str) -> Measured:
    """Processes that share one GPU and talk by `backend`, gradients accumulated, train as one without it."""
    recipe = ["--trainer.accumulate_grad_batches=2", f"--model.optimizer.name={optimizer}"]
    recipe += ["--trainer.devices=1"]
    alone = place.fit(f"one-{optimizer}", "quick", 20, *recipe, "--data.batch_size=16")
    name, shared = f"{backend}-{processes}-{optimizer}", f"--data.batch_size={16 // processes}"
    words = place.words_to_fit(name, "quick", 20, *recipe, shared)
    backend = "gloo" if place.dry else backend  # the only one of a CPU
    for told in run_together(place, backend, processes, words):
        expected = {"model": "DistributedDataParallel", "backend": backend, "processes": processes}
        assert told == expected, f"it was {told}, not {expected}"
    return {"processes": processes, "loss": difference(place.folder / "runs" / name, alone)}


def difference(run: Path, other: Path) -> float:
    """The largest relative difference of the losses of two runs, which has to be below 1 %."""
    pairs = zip(column(run, "train_loss"), column(other, "train_loss"), strict=True)
    worst = max(abs(one / two - 1) for one, two in pairs)
    assert worst < 0.01, f"losses differ by {worst:.2g}"
    return worst


def run_together(place: Place, backend: str, processes: int, words: list[str]) -> list[dict[str, Any]]:
    """Run one `gpt` on as many processes: what each of them says of how it trained.

    To Lightning each is a machine with one device, so that all may have the same one.
    """
    script = str(ROOT / "scripts" / "faults" / "replica.py")
    machines = {"GROUP_WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    shared = forked.as_torchrun(processes) | machines
    reports = [place.folder / f"replica-{rank}.json" for rank in range(processes)]

    def run(rank: int) -> tuple[int, str]:
        reports[rank].unlink(missing_ok=True)
        environment = with_package({**shared, "RANK": str(rank), "GROUP_RANK": str(rank)})
        command = [sys.executable, script, backend, str(reports[rank]), *words]
        return run_alone(command, place.folder, environment, place.seconds_left)

    with ThreadPoolExecutor(processes) as pool:
        for status, err in pool.map(run, range(processes)):
            if status:
                raise RuntimeError(f"gpt {' '.join(words[:6])}: status {status}: {err[-500:]}")
    return [json.loads(report.read_text(encoding="utf-8")) for report in reports]


def ddp_on_all(place: Place) -> Measured:
    """As many processes as GPUs, started by `gpt fit` itself, train as one does."""
    count = 0 if place.dry else torch.cuda.device_count()
    if count < 2:
        raise Needs("several GPUs")
    recipe = ("quick", 20, "--trainer.accumulate_grad_batches=2", "--model.optimizer.name=muon")
    alone = place.fit("single", *recipe, "--trainer.devices=1", "--data.batch_size=16")
    both = place.fit("all", *recipe, f"--trainer.devices={count}", f"--data.batch_size={16 // count}")
    return {"processes": count, "loss": difference(both, alone)}


def float16(place: Place, optimizer: str) -> Measured:
    """Trains in float16 with a scaled loss, as GPUs without bfloat16 do; a CPU cannot, and takes bfloat16."""
    precision = "bf16-mixed" if place.dry else "16-mixed"
    how = (f"--trainer.precision={precision}", f"--model.optimizer.name={optimizer}")
    first, *_, last = column(place.fit(f"float16-{optimizer}", "quick", 100, *how), "train_loss")
    assert math.isfinite(last) and (place.dry or last < first - 1), f"loss {first:.3f}, then {last:.3f}"
    return {"first loss": first, "last loss": last}


def memory(place: Place) -> Measured:
    """A batch that does not fit is one line, which asks for a smaller one."""
    update = f"--data.tokens_per_update={480 * (16 if place.dry else 1024)}"
    try:
        place.fit("memory", "gpt2-small", 1, update, "--data.batch_size=480")  # about 300 GB
    except RuntimeError as error:
        assert "memory" in str(error) and "Traceback" not in str(error), error
        return {}
    if place.dry:
        raise Needs("a GPU")
    raise AssertionError("480 windows fit")


def serving(place: Place) -> Measured:
    """Eight requests at once get the texts that each gets by itself; on a GPU rounding may differ."""
    if find_spec("fastapi") is None:
        raise Needs("fastapi")
    from benchmarks.serve import ask

    from gpt.serve.app import create_app

    torch.manual_seed(0)
    config = place.config()
    model = for_decoding(GPT(config).eval().to(place.device))
    new = 4 if place.dry else 64
    forms = [{"prompt": list(range(n + 1)), "max_tokens": new, "temperature": 0} for n in range(8)]
    with listening(create_app(model, Tokenizer("gpt2", config.vocab_size), name="random")) as address:
        alone = ask(address, forms, at_once=1)
        began = time.perf_counter()
        together = ask(address, forms, at_once=8)
        seconds = time.perf_counter() - began
    same = sum(one == other for one, other in zip(alone, together, strict=True))
    assert same >= (8 if place.dry else 1), f"{same} of 8 texts are equal"
    return {"equal": same, "s": seconds}


def training(place: Place, config: str, *options: str) -> Measured:
    """Speed and memory; the goal is half of the peak, 575,000 tokens a second of GPT-2 small on an H100."""
    small = ("--data.batch_size=2", "--data.tokens_per_update=32") if place.dry else ()
    steps = {"quick": 2000, "gpt2-small": 24}.get(config, 2)
    began = time.perf_counter()
    run = place.fit("speed", config, steps, "--trainer.devices=1", *options, *small)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    speeds = column(run, "tokens_per_second")[2:]  # the first rows have the time to compile
    shutil.rmtree(run)  # the largest checkpoint takes 13 GB
    measured = {"peak GB": summary["peak_memory_bytes"] / 1e9, "whole command s": time.perf_counter() - began}
    if speeds:  # two steps only show that a size fits
        speed = statistics.median(speeds)
        measured["tokens/s"] = speed
        if not place.dry and config != "quick" and (peak := peak_flops("bf16")):
            measured["MFU"] = speed * flops_per_token(GPTConfig.from_name(config)) / peak
    return measured


@dataclass(frozen=True)
class Case:
    """What is checked, and the seconds that it may take."""

    seconds: float
    check: Callable[[Place], Measured]


def case(seconds: float, check: Callable[..., Measured], *words: str, **options: Any) -> Case:
    """A case that calls a check with these words and options."""
    return Case(seconds, lambda place: check(place, *words, **options))


# What is right comes before what is fast, since a slow machine may not reach the last ones.
CASES: dict[str, Case] = {
    "precision: fp32": case(90, precision, dtype=None, tf32=False, limit=1e-4),
    "precision: tf32": case(60, precision, dtype=None, tf32=True, limit=1e-2),
    "precision: bf16": case(60, precision, dtype=torch.bfloat16, tf32=True, limit=6e-2),
    "precision: fp16": case(60, precision, dtype=torch.float16, tf32=True, limit=1e-2),
    "synchronisation: muon": case(30, synchronisation, "muon"),
    "synchronisation: adamw": case(30, synchronisation, "adamw"),
    "generation": case(60, generation),
    "resuming: deterministic": case(90, resuming, deterministic="true", compiled="false"),
    "resuming: as usual": case(90, resuming, deterministic="false", compiled="false"),
    "resuming: deterministic, compiled": case(180, resuming, deterministic="true", compiled="true"),
    "checkpoint: read on the CPU": case(60, checkpoint),
    "ddp: two processes share a GPU, adamw": case(90, ddp, "gloo", processes=2, optimizer="adamw"),
    "ddp: two processes share a GPU, muon": case(90, ddp, "gloo", processes=2, optimizer="muon"),
    "ddp: one process with NCCL": case(90, ddp, "nccl", processes=1, optimizer="muon"),
    "ddp: all GPUs": case(120, ddp_on_all),
    "float16: adamw": case(60, float16, "adamw"),
    "float16: muon": case(60, float16, "muon"),
    "memory": case(60, memory),
    "serving": case(60, serving),
    "training: gpt2-small": case(150, training, "gpt2-small", "--model.compile=true"),
    "training: quick": case(120, training, "quick"),
    "sizes: gpt2-medium": case(150, training, "gpt2-medium"),
    "sizes: gpt2-large": case(180, training, "gpt2-large"),
    "sizes: gpt2-xl": case(240, training, "gpt2-xl"),
}


def result_of(check: Callable[[Place], Measured], place: Place) -> tuple[str, Measured]:
    """What a case says and measures. One that raises must not end the others."""
    try:
        return "ok", check(place)
    except Needs as needs:
        return f"needs {needs}", {}
    except Exception as error:
        traceback.print_exc()
        return f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:200]}", {}
    finally:
        if not place.dry:
            torch.cuda.empty_cache()


def main() -> int:
    """Run the cases and print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    checks = dict.fromkeys(name.partition(":")[0] for name in CASES)
    parser.add_argument("--dry-run", action="store_true", help="take the same path on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.add_argument("--checks", default=",".join(checks), help="some of %(default)s")
    parser.add_argument("--minutes", type=float, default=30, help="all cases together, at most")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    if unknown := set(options.checks.split(",")) - set(checks):
        parser.error(f"there is no check {', '.join(unknown)}, expected some of {', '.join(checks)}")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("this machine has no GPU that PyTorch can use; --dry-run takes the CPU")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, end = Path(name), time.monotonic() + 60 * options.minutes
        os.environ["GPT_CACHE"] = str(folder / "cache")
        if options.dry_run:
            torch.set_num_threads(1)
            (folder / "text.txt").write_text("A fox jumps over the dog.\n" * 400, encoding="utf-8")
        device = "cpu" if options.dry_run else "cuda"
        for name, one in CASES.items():
            if name.partition(":")[0] in options.checks.split(","):
                say(name)
                began = time.monotonic()
                result = f"FAILED: not begun, it may take {one.seconds:.0f} s"
                measured: Measured = {}
                if began + one.seconds <= end:
                    place = Place(device=device, folder=folder, until=began + one.seconds)
                    result, measured = result_of(one.check, place)
                seconds = round(time.monotonic() - began, 1)
                rows.append({"case": name, "result": result, "measured": measured, "seconds": seconds})
                if options.json:
                    report = {"machine": machine(), "dry_run": options.dry_run, "rows": rows}
                    write_json(options.json, report)
    print("| case | result | measured |\n| --- | --- | --- |")
    for row in rows:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in row["measured"].items())
        print(f"| {row['case']} | {row['result']} | {figures} |")
    failed = sum(row["result"].startswith("FAILED") for row in rows)
    print(f"\n{len(rows)} cases, {failed} failed or not begun")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
