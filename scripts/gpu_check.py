"""Check this program on a GPU, in about thirty minutes: `python scripts/gpu_check.py --json gpu.json`.

Compares losses, gradients and logits with the CPU in float64, looks for host synchronisation, measures
training, its steps and generation, trains briefly in every size and strategy, and compares resumed runs.
Prints a table, which lists what could not run with the reason. The exit status is 1 if a check failed or was
not reached in time.

Where a machine is lent for a few minutes at a time, `--checks training,kernels --minutes 8` does a part. The
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
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package need not be installed

import torch
from benchmarks.common import machine, peak_flops, say, with_package
from benchmarks.step import Candidate, Worker
from benchmarks.step_worker import flops_per_token
from faults.fingerprint import fingerprint
from torch import Tensor
from torch.nn import functional as F

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.files import write_json
from gpt.generation import Engine, Request, Sampling, for_decoding
from gpt.generation.decoding import decoder_of
from gpt.training.compilation import compile_model, missing_compiler
from gpt.training.loss import cross_entropy
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.weights.checkpoint import read

ROOT = Path(__file__).parents[1]
MINUTES = 30
COMMAND_SECONDS = 180.0
"""The most time of one `gpt` command: the longest compile GPT-2 XL, or train the quick run."""
OUT_OF_TIME = "out of time"
NOT_IN_DRY_RUN = "left out of the dry run"
TINY = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)


class OutOfTime(Exception):
    """There is not enough time for a command."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the report."""

    check: str
    case: str
    passed: bool | None
    """None for a measurement without a limit, and for what this machine cannot run."""
    measured: dict[str, float] = field(default_factory=dict)
    not_run: str = ""
    """Why the case could not run."""

    @property
    def verdict(self) -> str:
        if self.not_run:
            return f"not run: {self.not_run}"
        return {True: "ok", False: "FAILED", None: "measured"}[self.passed]

    @property
    def figures(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in self.measured.items())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where and how much to check."""

    device: str
    dry: bool
    folder: Path
    deadline: float
    nanogpt: Path | None = None

    @property
    def gpus(self) -> int:
        return torch.cuda.device_count() if self.device == "cuda" else 1

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[object]:
        return torch.autocast(self.device, dtype) if dtype else nullcontext()

    def begin(self) -> None:
        """Raise OutOfTime where a command could not have its time any more."""
        if self.deadline - time.monotonic() < COMMAND_SECONDS:
            raise OutOfTime

    def gpt(
        self, *arguments: str, without_gpu: bool = False, sabotage: Callable[[int], None] | None = None
    ) -> float:
        """Run the `gpt` command in the folder; its seconds. In a dry run `sabotage` is called in its process.

        Raises:
            OutOfTime: it was not begun, as it could not have its time.
            RuntimeError: it failed; the message has the end of its output.
        """
        self.begin()
        began = time.perf_counter()
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
        return time.perf_counter() - began

    def fit(self, name: str, *options: str, sabotage: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Train a run of that name and return its summary; the rest as for `gpt`."""
        tiny = [f"--model.config.{key}={value}" for key, value in TINY_SHAPE.items()] if self.dry else []
        tiny += ["--data.corpus=text.txt"] if self.dry else []
        where = (f"--trainer.accelerator={self.device}", "--trainer.logger=csv")
        self.gpt("fit", *options, "--run", name, *where, *tiny, sabotage=sabotage)
        return json.loads((self.folder / "runs" / name / "summary.json").read_text(encoding="utf-8"))


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


TINY_SHAPE = {"vocab_size": 300, "context_length": 16, "emb_dim": 32, "num_heads": 2, "num_layers": 1}


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the norm of `expected`."""
    return float((found.double().cpu() - expected).norm() / expected.norm())


# By precision: autocast type, whether weights are bfloat16, TF32, and the relative error allowed.
PRECISIONS: dict[str, tuple[torch.dtype | None, bool, bool, float]] = {
    "fp32": (None, False, False, 1e-4),
    "tf32": (None, False, True, 1e-2),
    "bf16": (torch.bfloat16, False, True, 6e-2),
    "bf16-true": (None, True, True, 1e-1),
    "fp16": (torch.float16, False, True, 1e-2),
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
    missing = missing_compiler(torch.device(plan.device))
    for (name, (dtype, in_bfloat16, tf32, limit)), compiled in product(PRECISIONS.items(), (False, True)):
        case = f"{name}, compiled" if compiled else name
        if compiled and (missing or plan.dry):
            yield Row(check="precision", case=case, passed=None, not_run=missing or NOT_IN_DRY_RUN)
            continue
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch._dynamo.reset()  # with more than eight variants of a block it would compile no further one
        module = LanguageModel(config, OptimizerConfig(name="adamw"))
        module.model.load_state_dict(model.state_dict())
        module.to(plan.device)
        if in_bfloat16:
            module.bfloat16()
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
        passed = max(measured["gradients"], measured["logits"]) < limit and measured["loss"] < limit
        yield Row(check="precision", case=case, passed=passed, measured=measured)


# By case: whether the loss is one kernel, query, key and value one product, and the residual in bfloat16.
KERNELS = {
    "all": (True, True, True),
    "without the loss in one kernel": (False, True, True),
    "without one product": (True, False, True),
    "without a bfloat16 residual": (True, True, False),
    "none": (False, False, False),
    "all, and the model as a whole": (True, True, True),
}


def kernels(plan: Plan) -> Iterator[Row]:
    """What `compile_model` fuses on a GPU, each left out in turn: gradients against float64, and speed."""
    config, windows = (TINY, 1) if plan.dry else (GPTConfig(), 32)
    torch.manual_seed(0)
    model = GPT(config)
    batch = tuple(torch.randint(0, config.vocab_size, (2, 1, config.context_length)))
    exact = LanguageModel(config)
    exact.model.load_state_dict(model.state_dict())
    exact.double().loss(batch).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in exact.parameters()])
    missing = missing_compiler(torch.device(plan.device))
    for case, (one_kernel, one_product, residual) in KERNELS.items():
        whole = "whole" in case
        if whole and (missing or plan.dry):
            yield Row(check="kernels", case=case, passed=None, not_run=missing or NOT_IN_DRY_RUN)
            continue
        torch._dynamo.reset()
        module = LanguageModel(config, OptimizerConfig(name="adamw"), compile="whole" if whole else True)
        module.model.load_state_dict(model.state_dict())
        module.to(plan.device)
        if not plan.dry:
            compile_model(module)
        compiled = cross_entropy if plan.dry else torch.compile(cross_entropy)
        module.kernel, module.model.bfloat16_residual = compiled if one_kernel else None, residual
        for block in module.model.blocks:
            block.attention.one_product = one_product
        with plan.autocast(torch.bfloat16):
            module.loss(tuple(part.to(plan.device) for part in batch)).backward()
        error = relative(torch.cat([p.grad.double().flatten() for p in module.parameters()]), gradient)
        module.zero_grad()
        measured = {"gradients": error, **speed(plan, module, windows)}
        yield Row(check="kernels", case=case, passed=error < PRECISIONS["bf16"][-1], measured=measured)


def speed(plan: Plan, module: LanguageModel, windows: int) -> dict[str, float]:
    """Of an update by AdamW: tokens per second, the median of ten, and peak memory."""
    config, optimizer = module.config, build_optimizer(module.model, module.options.optimizer)
    shape = 2, windows, config.context_length
    batch = tuple(torch.randint(0, config.vocab_size, shape, device=plan.device))
    if plan.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(3 if plan.dry else 13):
        began = time.perf_counter()
        with plan.autocast(torch.bfloat16):
            loss = module.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if plan.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    measured = {"tokens/s": batch[0].numel() / statistics.median(seconds[-10:])}
    if plan.device == "cuda":
        measured["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
    return measured


def synchronisation(plan: Plan) -> Iterator[Row]:
    """An update of two micro-batches must not make the host wait for the GPU."""
    config = TINY if plan.dry else GPTConfig(context_length=256)
    for name in ("adamw", "muon"):
        module = LanguageModel(config, OptimizerConfig(name=name)).to(plan.device)
        optimizer = build_optimizer(module.model, module.options.optimizer)
        batch = torch.randint(0, config.vocab_size, (2, 2, config.context_length), device=plan.device)

        def update(module: LanguageModel = module, optimizer: Any = optimizer, batch: Tensor = batch) -> None:
            for _ in range(2):
                with plan.autocast(torch.bfloat16):
                    loss = module.loss((batch[0], batch[1]))
                loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()

        update()
        if plan.device != "cuda":
            update()
            yield Row(check="synchronisation", case=name, passed=None, not_run="the detector needs CUDA")
            continue
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            update()
            problem = ""
        except RuntimeError as error:
            problem = str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if problem:
            say(problem)
        yield Row(check="synchronisation", case=name, passed=not problem)


def steps(plan: Plan) -> Iterator[Row]:
    """Speed, memory and compile time of GPT-2 small's step, at several micro-batches."""
    context, batches = (16, (1,)) if plan.dry else (1024, (64, 60, 48, 32, 24, 16, 12))
    candidates = [
        (Candidate(peer="ours", precision="bf16-autocast", compiled=not plan.dry), n) for n in batches
    ]
    if plan.nanogpt:
        theirs = Candidate(peer="nanogpt", precision="bf16-autocast", compiled=True, folder=str(plan.nanogpt))
        candidates[1:1] = [(theirs, 32), (theirs, 12)]
    else:
        yield Row(check="steps", case="nanogpt", passed=None, not_run="no --nanogpt DIR")
    peak = None if plan.dry else peak_flops(torch.cuda.get_device_name(), "bf16")
    for candidate, windows in candidates:
        case = f"{candidate.peer}, {windows} x {context} tokens"
        plan.begin()
        try:
            with Worker(candidate, plan.device, windows, context, tiny=plan.dry) as worker:
                first = worker.ask("step")
                seconds = statistics.median(worker.ask("step") for _ in range(2 if plan.dry else 10))
                memory = worker.ask("memory")
        except SystemExit as error:  # out of memory, as a rule: the worker printed it
            yield Row(check="steps", case=case, passed=None, not_run=str(error))
            continue
        speed = windows * context / seconds
        measured = {"tokens/s": speed, "peak GB": memory / 1e9, "compile s": first - seconds}
        if peak:
            measured["MFU"] = speed * flops_per_token(context) / peak
        yield Row(check="steps", case=case, passed=None, measured=measured)


# By case: --model.compile, and further options.
TRAININGS = {
    "as configured": ("true",),
    "the model as a whole": ("whole",),
    "AdamW": ("true", "--model.optimizer.name=adamw"),
    "deterministic": ("true", "--trainer.deterministic=true"),
    "not compiled": ("false",),
}


def training(plan: Plan) -> Iterator[Row]:
    """`gpt fit` with GPT-2 small's configuration: half of the peak, 575,000 tokens a second, is the goal."""
    config = ("--config", str(ROOT / "configs" / "gpt2-small.yaml"))
    updates = 6 if plan.dry else 24
    short = (f"--trainer.max_steps={updates}", "--trainer.limit_val_batches=0", "--trainer.devices=1")
    short += ("--log_every=2", "--data.corpus=python-docs", "--data.val_fraction=0.01")
    short += ("--data.batch_size=1", "--data.tokens_per_update=32") if plan.dry else ()
    peak = None if plan.dry else peak_flops(torch.cuda.get_device_name(), "bf16")
    for case, (compiled, *options) in TRAININGS.items():
        if plan.dry and compiled == "whole":
            yield Row(check="training", case=case, passed=None, not_run=NOT_IN_DRY_RUN)
            continue
        name = f"training-{case.replace(' ', '-')}"
        how = f"--model.compile={'false' if plan.dry else compiled}"
        summary = plan.fit(name, *config, *short, how, *options)
        rows = metrics(plan.folder / "runs" / name, "tokens_per_second")
        shutil.rmtree(plan.folder / "runs" / name)
        speed = statistics.median(rows[2:])  # the first compile
        measured = {"tokens/s": speed, "peak GB": summary["peak_memory_bytes"] / 1e9}
        if peak:
            measured["MFU"] = speed * flops_per_token(1024) / peak
        yield Row(check="training", case=case, passed=summary["steps"] == updates, measured=measured)


def sizes(plan: Plan) -> Iterator[Row]:
    """The first two updates of GPT-2's four sizes, each with its own configuration."""
    small = ("--data.batch_size=2", "--data.tokens_per_update=32") if plan.dry else ()
    for name in GPTConfig.names():
        config = ("--config", str(ROOT / "configs" / f"{name}.yaml"))
        short = ("--data.corpus=python-docs", "--trainer.max_steps=2", "--trainer.limit_val_batches=0")
        summary = plan.fit(name, *config, *short, "--data.val_fraction=0.01", *small)
        shutil.rmtree(plan.folder / "runs" / name)  # the largest checkpoint takes 13 GB
        measured = {"tokens/s": summary["tokens_per_second"], "peak GB": summary["peak_memory_bytes"] / 1e9}
        yield Row(check="sizes", case=name, passed=summary["steps"] == 2, measured=measured)


QUICK = {
    "gpt fit": (),
    "not compiled": ("--model.compile=false",),
    "compiled": ("--model.compile=true",),
}


def quick(plan: Plan) -> Iterator[Row]:
    """The quick run as `gpt fit` starts it, then with and without compiling: which takes less time in all?"""
    short = ("--trainer.max_steps=4", "--trainer.val_check_interval=4") if plan.dry else ()
    config = ("--config", str(ROOT / "configs" / "quick.yaml"))
    for number, (case, options) in enumerate(QUICK.items()):
        if plan.dry and options:
            yield Row(check="quick", case=case, passed=None, not_run=NOT_IN_DRY_RUN)
            continue
        began = time.perf_counter()
        summary = plan.fit(f"quick-{number}", *config, *short, *options)
        measured = {
            "training s": summary["train_seconds"],
            "whole command s": time.perf_counter() - began,
            "bits per byte": summary["val_bits_per_byte"],
        }
        passed = math.isfinite(summary["val_loss"]) and (plan.dry or summary["val_bits_per_byte"] < 2.0)
        yield Row(check="quick", case=case, passed=passed, measured=measured)


def checkpoint_on_the_cpu(plan: Plan) -> Iterator[Row]:
    """A checkpoint of the device is read where there is none."""
    config = ("--config", str(ROOT / "configs" / "quick.yaml"))
    plan.fit("read", *config, "--trainer.max_steps=4", "--trainer.val_check_interval=4")
    plan.gpt("generate", "--checkpoint", "runs/read", "--prompt", "The", without_gpu=True)
    yield Row(check="checkpoint", case="read on the CPU", passed=True)


def kernel_by_kernel(model: GPT, tokens: Tensor, new: int) -> None:
    """`generate` without CUDA graphs, greedy."""
    engine = Engine(model, graphs=False)
    for row in tokens.tolist():
        engine.add(Request(tokens=row, max_new_tokens=new, sampling=Sampling(temperature=0)))
    for _ in engine.run():
        pass


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


def graphs(plan: Plan, model: GPT, prompts: list[list[int]]) -> Iterator[Row]:
    """CUDA graphs change no token, also in two threads; the host waits once for eight tokens of all texts."""
    for case, samplings in SAMPLINGS.items():
        expected = write(Engine(model, graphs=False), prompts, samplings)
        with ThreadPoolExecutor() as pool:
            both = pool.map(
                lambda one, how=samplings: write(one, prompts, how), [Engine(model), Engine(model)]
            )
        same = [found == expected for found in both]
        count = sum(bool(one) for cache in decoder_of(model).caches for one in cache.recorded.values())
        passed = all(same) and (plan.dry or count > 0)
        case = f"graphs change no token, {case}"
        yield Row(check="generation", case=case, passed=passed, measured={"graphs": count})
    if plan.device != "cuda":
        case = "waits of the host"
        yield Row(check="generation", case=case, passed=None, not_run="the detector needs CUDA")
        return
    for case in ("greedy", "top-p"):
        engine = Engine(model)
        for row in prompts:
            engine.add(Request(tokens=row, max_new_tokens=49, sampling=SAMPLINGS[case][0], seed=0))
        for _ in range(4):  # the prompts, and until a graph is recorded
            engine.step()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        count = sum("synchronizing" in str(wait.message) for wait in waits)
        measured = {"waits for 8 tokens": count}
        yield Row(check="generation", case=f"waits of the host, {case}", passed=count == 1, measured=measured)


def generation(plan: Plan) -> Iterator[Row]:
    """Greedy ids against the CPU; graphs; speed at batch 1 and 8, beside transformers."""
    config, new = (TINY, 4) if plan.dry else (GPTConfig(), 64)
    torch.manual_seed(0)
    model = GPT(config).eval()
    prompts = torch.randint(0, config.vocab_size, (8, min(32, config.context_length // 2)))
    options: dict[str, Any] = {"max_new_tokens": new, "temperature": 0}
    expected = generate(model, prompts, **options)
    on_device = copy.deepcopy(model).to(plan.device)
    torch.set_float32_matmul_precision("highest")
    same = torch.equal(generate(on_device, prompts.to(plan.device), **options).cpu(), expected)
    yield Row(check="generation", case="greedy ids equal the CPU's", passed=same)
    half = on_device if plan.dry else on_device.bfloat16()
    yield from graphs(plan, half, prompts.tolist())
    calls: dict[str, Callable[[Tensor], object]] = {"ours": lambda tokens: generate(half, tokens, **options)}
    calls["ours, kernel by kernel"] = lambda tokens: kernel_by_kernel(half, tokens, new)
    if find_spec("transformers") and not plan.dry:
        from benchmarks.generate import their_model, their_text

        theirs = their_model(config, torch.bfloat16).to(plan.device)
        calls["transformers"] = lambda tokens: their_text(theirs, tokens, None, new)
    else:
        why = NOT_IN_DRY_RUN if plan.dry else "transformers is not installed"
        yield Row(check="generation", case="transformers", passed=None, not_run=why)
    for batch, (name, call) in product((1, 8), calls.items()):
        tokens = prompts[:batch].to(plan.device)
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            call(tokens)
            if plan.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        measured = {"tokens/s": batch * new / statistics.median(seconds[1:]), "first call s": seconds[0]}
        yield Row(check="generation", case=f"{name}, batch {batch}", passed=None, measured=measured)


# By case: --trainer.deterministic and --model.compile.
RESUMED = {
    "deterministic": ("true", "false"),
    "default mode": ("false", "false"),
    "deterministic, compiled": ("true", "true"),
}


def resuming(plan: Plan) -> Iterator[Row]:
    """A resumed run equals the uninterrupted one: always in the deterministic mode, and on a CPU."""
    total = 4 if plan.dry else 40
    shared = ("--config", str(ROOT / "configs" / "quick.yaml"), "--model.config.dropout=0.1")
    shared += ("--model.optimizer.schedule=constant", f"--trainer.val_check_interval={total // 2}")
    for number, (case, (mode, compiled)) in enumerate(RESUMED.items()):
        if plan.dry and compiled == "true":
            yield Row(check="resuming", case=case, passed=None, not_run=NOT_IN_DRY_RUN)
            continue
        options = (*shared, f"--trainer.deterministic={mode}", f"--model.compile={compiled}")
        whole = plan.fit(f"straight-{number}", *options, f"--trainer.max_steps={total}")
        plan.fit(f"stopped-{number}", *options, f"--trainer.max_steps={total // 2}")
        plan.gpt("fit", "--resume", f"runs/stopped-{number}", f"--trainer.max_steps={total}")
        runs = [plan.folder / "runs" / f"{name}-{number}" for name in ("straight", "stopped")]
        equal = fingerprint(runs[0])[0] == fingerprint(runs[1])[0]
        one, other = (read(run / "checkpoints" / "last.safetensors").weights for run in runs)
        difference = max(float((one[name].float() - other[name].float()).abs().max()) for name in one)
        must = mode == "true" or plan.device == "cpu"
        yield Row(
            check="resuming",
            case=case,
            passed=equal if must else None,
            measured={"largest difference": difference, "tokens/s": whole["tokens_per_second"]},
        )


def strategies(plan: Plan) -> Iterator[Row]:
    """DDP and FSDP2 on all GPUs, with accumulated gradients, train as one process does."""
    shared = ("--config", str(ROOT / "configs" / "quick.yaml"), "--trainer.accumulate_grad_batches=2")
    shared += (
        f"--trainer.max_steps={4 if plan.dry else 20}",
        "--trainer.limit_val_batches=0",
        "--log_every=2",
    )
    for optimizer in ("adamw", "muon"):
        recipe = (*shared, f"--model.optimizer.name={optimizer}")
        plan.fit(f"one-{optimizer}", *recipe, "--data.batch_size=16", "--trainer.devices=1")
        expected = metrics(plan.folder / "runs" / f"one-{optimizer}", "train_loss")
        for strategy in ("ddp", "fsdp2"):
            options = (f"--trainer.strategy={strategy}", f"--trainer.devices={plan.gpus}")
            name = f"{strategy}-{optimizer}"
            plan.fit(name, *recipe, *options, f"--data.batch_size={16 // plan.gpus}")
            found = metrics(plan.folder / "runs" / name, "train_loss")
            worst = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
            case = f"{strategy}, {optimizer}, {plan.gpus} processes"
            yield Row(check="strategies", case=case, passed=worst < 0.01, measured={"loss": worst})


def float16(plan: Plan) -> Iterator[Row]:
    """Trains in float16 with a scaled loss, as GPUs without bfloat16 do; a CPU takes bfloat16 instead."""
    short = (f"--trainer.max_steps={4 if plan.dry else 100}", "--trainer.limit_val_batches=0")
    config = ("--config", str(ROOT / "configs" / "quick.yaml"), "--trainer.precision=16-mixed")
    for optimizer in ("adamw", "muon"):
        name = f"float16-{optimizer}"
        plan.fit(name, *config, *short, "--log_every=2", f"--model.optimizer.name={optimizer}")
        losses = metrics(plan.folder / "runs" / name, "train_loss")
        measured = {"first loss": losses[0], "last loss": losses[-1]}
        passed = math.isfinite(losses[-1]) and (plan.dry or losses[-1] < losses[0] - 1)
        yield Row(check="float16", case=optimizer, passed=passed, measured=measured)


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
    config = ("--config", str(ROOT / "configs" / "gpt2-small.yaml"), "--data.corpus=python-docs")
    update = (f"--data.batch_size={most}", f"--data.tokens_per_update={most * context}")
    short = ("--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.devices=1")
    plan.fit("memory", *config, *update, *short, "--model.compile=false", sabotage=lack_memory)
    saved = (plan.folder / "runs" / "memory" / "config.yaml").read_text(encoding="utf-8")
    (found,) = (int(line.split()[1]) for line in saved.splitlines() if line.startswith("  batch_size:"))
    yield Row(check="memory", case="search", passed=0 < found < most, measured={"windows": found})


def serving(plan: Plan) -> Iterator[Row]:
    """Eight requests at once over HTTP get the texts that each gets alone; on a GPU rounding may differ."""
    if not find_spec("fastapi"):
        yield Row(check="serving", case="all", passed=None, not_run="the extra serve is not installed")
        return
    from benchmarks.common import listening

    from gpt.serve.app import create_app

    torch.manual_seed(0)
    tokenizer = Tokenizer("gpt2", TINY.vocab_size) if plan.dry else Tokenizer()
    model = for_decoding(GPT(TINY if plan.dry else GPTConfig()).eval().to(plan.device))
    with listening(create_app(model, tokenizer, name="random")) as address:

        def ask(n: int) -> str:
            form = {"prompt": list(range(n + 1)), "max_tokens": 4 if plan.dry else 64, "temperature": 0}
            request = urllib.request.Request(
                f"{address}/v1/completions",
                json.dumps(form).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=COMMAND_SECONDS) as answer:
                return str(json.load(answer)["choices"][0]["text"])

        alone = [ask(n) for n in range(8)]
        began = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(ask, range(8)))
        seconds = time.perf_counter() - began
    same = sum(one == other for one, other in zip(alone, together, strict=True))
    passed = same == 8 if plan.device == "cpu" else same >= 1
    yield Row(check="serving", case="eight at once", passed=passed, measured={"equal": same, "s": seconds})


def metrics(run: Path, name: str) -> list[float]:
    """A column of a run's metrics.csv, where it is not empty."""
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


# What is right comes before what is fast, since a slow machine may not reach the last ones.
CHECKS: dict[str, Callable[[Plan], Iterator[Row]]] = {
    "precision": precision,
    "synchronisation": synchronisation,
    "generation": generation,
    "resuming": resuming,
    "checkpoint": checkpoint_on_the_cpu,
    "strategies": strategies,
    "float16": float16,
    "memory": memory,
    "serving": serving,
    "training": training,
    "quick": quick,
    "steps": steps,
    "kernels": kernels,
    "sizes": sizes,
}
COMMANDS = ("resuming", "checkpoint", "strategies", "float16", "memory", "training", "quick", "sizes")
"""Checks that run `gpt` in a process of its own, which needs packages that all others do without."""
PACKAGES = ("jsonargparse", "docstring_parser", "typeshed_client")


def run_all(plan: Plan, names: list[str], report: Callable[[list[Row]], None]) -> list[Row]:
    """The checks of these names. One that raises becomes a row; no case begins after the deadline.

    `report` gets the rows after each of them.
    """
    rows: list[Row] = []
    lacking = ", ".join(package for package in PACKAGES if not find_spec(package))
    for name in names:
        say(f"{name}: {(CHECKS[name].__doc__ or '').strip()}")
        found = CHECKS[name](plan)
        while True:
            not_run = f"gpt fit needs {lacking}" if lacking and name in COMMANDS else ""
            not_run = OUT_OF_TIME if time.monotonic() > plan.deadline else not_run
            try:
                row = (
                    Row(check=name, case="the rest", passed=False, not_run=not_run)
                    if not_run
                    else next(found)
                )
            except StopIteration:
                break
            except OutOfTime:
                not_run = OUT_OF_TIME
                row = Row(check=name, case="the rest", passed=False, not_run=not_run)
            except Exception as error:  # a check that cannot run must not end the others
                traceback.print_exc()
                not_run = " ".join(str(error).split())[:200]
                row = Row(check=name, case=type(error).__name__, passed=False, not_run=not_run)
            rows.append(row)
            say(f"  {row.case}: {row.verdict} {row.figures}")
            report(rows)
            if not_run:
                break
        del found  # with the processes of a case that was not ended
        gc.collect()
        if plan.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def table(rows: list[Row]) -> str:
    """The report as a Markdown table."""
    lines = ["| check | case | result | measured |", "| --- | --- | --- | --- |"]
    for row in rows:
        lines.append(f"| {row.check} | {row.case} | {row.verdict} | {row.figures} |")
    return "\n".join(lines)


def main() -> int:
    """Run the checks and print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="take the same path on the CPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT")
    parser.add_argument("--checks", default=",".join(CHECKS), help="some of %(default)s")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no case begins after so many minutes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    names = options.checks.split(",")
    if unknown := ", ".join(name for name in names if name not in CHECKS):
        parser.error(f"there is no check {unknown}, expected some of {', '.join(CHECKS)}")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("this machine has no GPU that PyTorch can use; --dry-run takes the CPU")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPT_CACHE"] = str(Path(folder) / "cache")
        if options.dry_run:
            torch.set_num_threads(1)
            import gpt.run.fit  # noqa: F401 - once, before the runs are forked

            (Path(folder) / "text.txt").write_text("A fox jumps over the dog.\n" * 400, encoding="utf-8")
        plan = Plan(
            device="cpu" if options.dry_run else "cuda",
            dry=options.dry_run,
            folder=Path(folder),
            deadline=began + 60 * options.minutes,
            nanogpt=options.nanogpt,
        )
        said = {"machine": machine(), "dry_run": options.dry_run}

        def report(rows: list[Row]) -> None:
            if options.json:
                found = [{**asdict(row), "verdict": row.verdict} for row in rows]
                write_json(options.json, {**said, "rows": found})

        rows = run_all(plan, names, report)
    print(table(rows))
    failed = [row for row in rows if row.passed is False]
    print(f"\n{len(rows)} cases, {len(failed)} failed or not reached, {time.monotonic() - began:.0f} seconds")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
