"""`benchmark.py step`: one training step of GPT-2 small, beside other implementations of the same model.

Each candidate is a process of its own, this file, so that its peak memory can be measured. They step in
turns. A peer runs eager or compiled, whichever is faster on this machine.
"""

import json
import resource
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where this file is a worker
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from benchmarks.common import Report, Seconds, Timing, interleave, peak_flops, say, synchronize, timed_rows
from scale import flops_per_token
from torch.nn.functional import cross_entropy

from gpt import GPTConfig
from gpt.training.compilation import compile_model
from gpt.training.device import keep_freed_memory
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig, build_optimizer

VOCABULARY = 50257


class Worker:
    """A process that takes one training step per request."""

    def __init__(self, peer: str, precision: str, compiled: bool, **more: Any) -> None:
        self.name = f"{peer}, {precision}{', compiled' if compiled else ''}"
        candidate = {"peer": peer, "precision": precision, "compiled": compiled, **more}
        command = [sys.executable, __file__, json.dumps(candidate)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, encoding="utf-8")

    def ask(self, word: str) -> float:
        """Send a word and read the number that answers it."""
        try:
            print(word, file=self.process.stdin, flush=True)
            return float(self.process.stdout.readline())
        except (BrokenPipeError, ValueError):
            raise SystemExit(f"{self.name} failed: see its message above") from None

    def __enter__(self) -> "Worker":
        self.ask("step")  # the first compiles
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()


def run(
    quick: bool,
    device: str = "cpu",
    batch: int | None = None,
    nanogpt: Path | None = None,
    book: Path | None = None,
) -> Report:
    """Measure every available peer in float32 and in bfloat16."""
    on_gpu = device.startswith("cuda")
    batch, context = batch or (32 if on_gpu else 4), 1024 if on_gpu else 256
    shape: dict[str, Any] = {"device": device, "batch": batch, "context": context}
    folders = {"transformers": "" if find_spec("transformers") else None, "nanogpt": nanogpt, "book": book}
    peers = {peer: str(folder) for peer, folder in folders.items() if folder is not None}
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for precision in ("fp32", "bf16"):
        how = {"precision": precision, **shape}
        candidates = [{"peer": "ours", "compiled": on_gpu or not quick, "folder": "", **how}]
        for peer, folder in peers.items():
            one = {"peer": peer, "compiled": False, "folder": folder, **how}
            candidates.append(one if quick else faster(one, {**one, "compiled": True}))
        timings: dict[str, Timing] = {}
        memory: dict[str, float] = {}
        # A GPU's memory may not hold all of them, and its speed hardly varies.
        for some in [[one] for one in candidates] if on_gpu else [candidates]:
            with ExitStack() as stack:
                workers = {(w := stack.enter_context(Worker(**one))).name: w for one in some}
                say(f"stepping {'; '.join(workers)}")
                calls = {name: lambda w=worker: Seconds(w.ask("step")) for name, worker in workers.items()}
                timings |= interleave(calls, 3 if quick else 9)
                memory |= {name: worker.ask("memory") for name, worker in workers.items()}
        for row in timed_rows(timings, batch * context, "tokens/s"):
            rows.append({**row, "peak memory (MB)": round(memory[row["candidate"]] / 1e6)})
        mine, *others = timings
        if others:
            times = [timings[mine].times_faster_than(timings[name]) for name in others]
            ratios[f"step_{precision}_vs_best_peer"] = min(times)
            ratios["step_memory_vs_leanest_peer"] = min(memory[name] for name in others) / memory[mine]
        if on_gpu and (peak := peak_flops(precision)):
            best = batch * context / timings[mine].median
            ratios[f"step_{precision}_mfu"] = best * flops_per_token(GPTConfig(), context) / peak
    return Report(
        title=f"A training step of GPT-2 small, {batch} x {context} tokens, on {device}",
        rows=rows,
        ratios=ratios,
        notes=[
            "Forward, backward, clipping and update with fused AdamW. bf16 is autocast; the memory of it has "
            "the ratio."
        ],
    )


def faster(*candidates: dict[str, Any]) -> dict[str, Any]:
    """The one that steps faster on its own."""
    seconds = []
    for candidate in candidates:
        with Worker(**candidate) as worker:
            say(f"trying {worker.name}")
            seconds.append(min(worker.ask("step") for _ in range(3)))
    return candidates[seconds.index(min(seconds))]


def model_of(peer: str, context: int, folder: str) -> Any:
    """A peer's model of the shape of GPT-2 small."""
    if peer == "transformers":
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_positions=context, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
        return GPT2LMHeadModel(config).train()
    if peer == "nanogpt":
        sys.path.insert(0, folder)
        from model import GPT, GPTConfig  # type: ignore[import-not-found]

        return GPT(GPTConfig(block_size=context, vocab_size=VOCABULARY, dropout=0.0, bias=True))
    sys.path.insert(0, str(Path(folder) / "pkg"))
    from llms_from_scratch.ch04 import GPTModel  # type: ignore[import-not-found]

    sizes = {"vocab_size": VOCABULARY, "context_length": context, "emb_dim": 768}
    return GPTModel({**sizes, "n_heads": 12, "n_layers": 12, "drop_rate": 0.0, "qkv_bias": True})


def work(
    peer: str, precision: str, compiled: bool, device: str, batch: int, context: int, folder: str
) -> None:
    """Build the candidate; answer "step" with the seconds of one, and "memory" with the peak in bytes."""
    answers, sys.stdout = sys.stdout, sys.stderr  # some peers print while they are built
    torch.manual_seed(0)
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.set_float32_matmul_precision("high")  # TF32, for every candidate alike
    tokens = torch.randint(0, VOCABULARY, (batch, context + 1), device=device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if peer == "ours":  # what `gpt fit` trains
        keep_freed_memory()
        recipe = OptimizerConfig(name="adamw")
        module = LanguageModel(GPTConfig(context_length=context), recipe)
        module.to(device)
        if compiled:
            compile_model(module)
        optimizer = build_optimizer(module.model, recipe)
    else:
        module = model_of(peer, context, folder).to(device)
        forward = torch.compile(module) if compiled else module
        how: dict[str, Any] = {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        optimizer = torch.optim.AdamW(module.parameters(), **how)

    def loss() -> torch.Tensor:
        if peer == "ours":
            return module.loss((x, y))
        if peer == "nanogpt":
            return forward(x, y)[1]
        out = forward(x)
        logits = out.logits if peer == "transformers" else out
        return cross_entropy(logits.flatten(0, 1), y.flatten())

    autocast = torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=precision == "bf16")

    def step() -> float:
        began = time.perf_counter()
        with autocast:
            found = loss()
        found.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        return time.perf_counter() - began

    for line in sys.stdin:
        if line.strip() == "step":
            answer: float = step()
        elif on_gpu:
            answer = torch.cuda.max_memory_allocated()
        else:
            answer = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    work(**json.loads(sys.argv[1]))
