"""Check this program on a GPU, in about thirty minutes: `python scripts/gpu_check.py --json gpu.json`.

Compares losses, gradients and logits with the CPU in float64, looks for host synchronisation, compares texts
and resumed runs, trains briefly in every precision and size and with DDP, serves, and measures the speed of
training and generation. Prints a table. The exit status is 1 if a case failed or was not reached in time.

Where a machine is lent for a few minutes at a time, `--checks training,sizes --minutes 8` does a part. The
report is written after each case, so one that is killed leaves what it has found. A command that could not
have its time any more is not begun, and what runs ends with this program.

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package need not be installed

import torch
from benchmarks.common import listening, machine, peak_flops, say, with_package
from benchmarks.serve import ask
from faults.fingerprint import fingerprint
from scale import flops_per_token
from torch import Tensor
from torch.nn.functional import cross_entropy

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.files import write_json
from gpt.generation import Engine, Request, Sampling, for_decoding
from gpt.serve.app import create_app
from gpt.training.compilation import compile_model
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig, build_optimizer

ROOT = Path(__file__).parents[1]
COMMAND_SECONDS = 180.0
"""The most time of one `gpt` command: the longest compile GPT-2 XL, or train the quick run."""
SHAPE = {"vocab_size": 300, "context_length": 16, "emb_dim": 32, "num_heads": 2, "num_layers": 1}
Measured = dict[str, float]


class NotReached(Exception):
    """There is not enough time left for a command."""


class NeedsGPU(Exception):
    """The CPU has nothing of the kind."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where and how much to check."""

    device: str
    folder: Path
    deadline: float

    @property
    def dry(self) -> bool:
        return self.device == "cpu"

    def config(self, **fields: int) -> GPTConfig:
        return GPTConfig(**SHAPE) if self.dry else GPTConfig(**fields)

    def gpt(self, *words: str, **environment: str) -> None:
        """Run the `gpt` command in the folder.

        Raises:
            NotReached: it was not begun, as it could not have its time.
            RuntimeError: it failed; the message has the end of its output.
        """
        if self.deadline - time.monotonic() < COMMAND_SECONDS:
            raise NotReached
        if self.dry:  # a fork needs no imports
            from faults.forked import run

            ended = run(self.folder, list(words), environment=environment)
            status, err = ended.status, ended.err
        else:
            command = [sys.executable, "-m", "gpt.cli", *words]
            status, err = run_alone(command, self.folder, with_package(environment))
        if status:
            raise RuntimeError(f"gpt {' '.join(words[:6])}: status {status}: {err[-500:]}")

    def fit(self, name: str, config: str, steps: int, *more: str) -> Path:
        """Train with configs/`config`.yaml for so many steps, fewer in a dry run: the run's folder."""
        options = [f"--config={config}", "--data.corpus=python-docs", "--data.val_fraction=0"]
        options += ["--log_every=2", f"--trainer.accelerator={self.device}"]
        options += ["--trainer.logger=csv", "--run", name, *more]
        if self.dry:
            options += [f"--model.config.{key}={value}" for key, value in SHAPE.items()]
            options += ["--data.corpus=text.txt", "--model.compile=false"]
        self.gpt("fit", *options, f"--trainer.max_steps={4 if self.dry else steps}")
        return self.folder / "runs" / name


def run_alone(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Status and stderr of a command and of all processes that it starts, none of which is left."""
    how: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **how) as process:
        try:
            _, err = process.communicate(timeout=COMMAND_SECONDS)
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
    gradient = torch.cat([parameter.grad.flatten() for parameter in double.parameters()])
    return model, x, y, loss.detach(), gradient, logits.detach()


def precision(place: Place, dtype: torch.dtype | None, tf32: bool, limit: float) -> Measured:
    """Loss, gradients and logits, compiled on a GPU and not, against float64 on the CPU."""
    config, measured = place.config(context_length=256), {}
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
        flat = torch.cat([parameter.grad.double().flatten() for parameter in module.model.parameters()])
        measured |= {f"{kind}loss": relative(found.detach(), loss), f"{kind}logits": relative(theirs, logits)}
        measured[f"{kind}gradients"] = relative(flat / scale, gradient)
    assert max(measured.values()) < limit, measured
    return measured


def synchronisation(place: Place, name: str) -> Measured:
    """An update of two micro-batches must not make the host wait for the GPU."""
    config = place.config(context_length=256)
    module = LanguageModel(config, OptimizerConfig(name=name)).to(place.device)
    optimizer = build_optimizer(module.model, module.options.optimizer)
    x, y = torch.randint(0, config.vocab_size, (2, 2, config.context_length), device=place.device)

    def update() -> None:
        for _ in range(2):
            with torch.autocast(place.device, torch.bfloat16):
                loss = module.loss((x, y))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    update()  # the first may wait
    if place.dry:
        raise NeedsGPU
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
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
    how = (f"--trainer.deterministic={deterministic}", f"--model.compile={compiled}")
    how += ("--model.config.dropout=0.1", "--model.optimizer.schedule=constant")
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


def ddp(place: Place, optimizer: str) -> Measured:
    """All GPUs with accumulated gradients train as one process does."""
    count = 1 if place.dry else torch.cuda.device_count()
    recipe = ("--trainer.accumulate_grad_batches=2", f"--model.optimizer.name={optimizer}")
    alone = place.fit(f"one-{optimizer}", "quick", 20, *recipe, "--trainer.devices=1", "--data.batch_size=16")
    shared = (f"--trainer.devices={count}", f"--data.batch_size={16 // count}")
    both = place.fit(f"ddp-{optimizer}", "quick", 20, *recipe, *shared)
    pairs = zip(column(both, "train_loss"), column(alone, "train_loss"), strict=True)
    worst = max(abs(one / other - 1) for one, other in pairs)
    assert worst < 0.01, f"losses differ by {worst:.2g}"
    return {"processes": count, "loss": worst}


def float16(place: Place, optimizer: str) -> Measured:
    """Trains in float16 with a scaled loss, as GPUs without bfloat16 do; a CPU takes bfloat16 instead."""
    how = ("--trainer.precision=16-mixed", f"--model.optimizer.name={optimizer}")
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
        raise NeedsGPU
    raise AssertionError("480 windows fit")


def serving(place: Place) -> Measured:
    """Eight requests at once over HTTP get the texts that each gets alone; on a GPU rounding may differ."""
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
    speeds = column(run, "tokens_per_second")
    speed = statistics.median(speeds[2:] or speeds)  # the first compile
    shutil.rmtree(run)  # the largest checkpoint takes 13 GB
    measured = {"tokens/s": speed, "peak GB": summary["peak_memory_bytes"] / 1e9}
    measured["whole command s"] = time.perf_counter() - began
    if not place.dry and config != "quick" and (peak := peak_flops("bf16")):
        measured["MFU"] = speed * flops_per_token(GPTConfig.from_name(config)) / peak
    return measured


# What is right comes before what is fast, since a slow machine may not reach the last ones.
CASES: dict[str, Callable[[Place], Measured]] = {
    "precision: fp32": partial(precision, dtype=None, tf32=False, limit=1e-4),
    "precision: tf32": partial(precision, dtype=None, tf32=True, limit=1e-2),
    "precision: bf16": partial(precision, dtype=torch.bfloat16, tf32=True, limit=6e-2),
    "precision: fp16": partial(precision, dtype=torch.float16, tf32=True, limit=1e-2),
    "synchronisation: muon": partial(synchronisation, name="muon"),
    "generation": generation,
    "resuming: deterministic": partial(resuming, deterministic="true", compiled="false"),
    "resuming: as usual": partial(resuming, deterministic="false", compiled="false"),
    "resuming: deterministic, compiled": partial(resuming, deterministic="true", compiled="true"),
    "checkpoint: read on the CPU": checkpoint,
    "ddp: adamw": partial(ddp, optimizer="adamw"),
    "ddp: muon": partial(ddp, optimizer="muon"),
    "float16: adamw": partial(float16, optimizer="adamw"),
    "float16: muon": partial(float16, optimizer="muon"),
    "memory": memory,
    "serving": serving,
    "training: gpt2-small": lambda place: training(place, "gpt2-small", "--model.compile=true"),
    "training: quick": lambda place: training(place, "quick"),
    "sizes: gpt2-medium": lambda place: training(place, "gpt2-medium"),
    "sizes: gpt2-large": lambda place: training(place, "gpt2-large"),
    "sizes: gpt2-xl": lambda place: training(place, "gpt2-xl"),
}


def result_of(case: Callable[[Place], Measured], place: Place) -> tuple[str, Measured]:
    """What a case says and measures. One that raises must not end the others."""
    try:
        if time.monotonic() > place.deadline:
            raise NotReached
        return "ok", case(place)
    except NotReached:
        return "FAILED: not reached in time", {}
    except NeedsGPU:
        return "needs a GPU", {}
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
    parser.add_argument("--minutes", type=float, default=30, help="no case begins after so many minutes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    if unknown := set(options.checks.split(",")) - set(checks):
        parser.error(f"there is no check {', '.join(unknown)}, expected some of {', '.join(checks)}")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("this machine has no GPU that PyTorch can use; --dry-run takes the CPU")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, deadline = Path(name), time.monotonic() + 60 * options.minutes
        os.environ["GPT_CACHE"] = str(folder / "cache")
        if options.dry_run:
            torch.set_num_threads(1)
            import gpt.run.fit  # noqa: F401 - once, before the runs are forked

            (folder / "text.txt").write_text("A fox jumps over the dog.\n" * 400, encoding="utf-8")
        place = Place(device="cpu" if options.dry_run else "cuda", folder=folder, deadline=deadline)
        for name, case in CASES.items():
            if name.partition(":")[0] in options.checks.split(","):
                say(name)
                result, measured = result_of(case, place)
                rows.append({"case": name, "result": result, "measured": measured})
                if options.json:
                    report = {"machine": machine(), "dry_run": options.dry_run, "rows": rows}
                    write_json(options.json, report)
    print("| case | result | measured |\n| --- | --- | --- |")
    for row in rows:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in row["measured"].items())
        print(f"| {row['case']} | {row['result']} | {figures} |")
    failed = sum(row["result"].startswith("FAILED") for row in rows)
    print(f"\n{len(rows)} cases, {failed} failed or not reached")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
