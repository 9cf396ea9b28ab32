"""`benchmark.py step`: one training step of GPT-2 small, beside other implementations of the same model.

It measures twice. First all candidates step interleaved in one process with the same settings: the ratio of
the arithmetic. Then, on a CPU, each runs in a process of its own, as its users run it: only `gpt fit` sets
the allocator to keep freed memory. A peer runs eager or compiled, whichever is faster on this machine.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import (
    ROOT,
    Report,
    Seconds,
    Timing,
    interleave,
    peak_flops,
    run_python,
    say,
    synchronize,
    timed_rows,
)
from scale import flops_per_token
from torch.nn.functional import cross_entropy

from gpt import GPTConfig
from gpt.training.compilation import compile_model
from gpt.training.device import keep_freed_memory
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig, build_optimizer

VOCABULARY = 50257


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
    folders = {"transformers": "" if find_spec("transformers") else None, "nanogpt": nanogpt, "book": book}
    if on_gpu:
        torch.set_float32_matmul_precision("high")  # TF32, for every candidate alike
    keep_freed_memory()  # likewise
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for precision in ("fp32", "bf16"):
        build = partial(step_of, precision=precision, device=device, batch=batch, context=context)
        kinds_of = {"ours": (not quick, "")}  # whether each is compiled, and its folder
        for peer, folder in folders.items():
            if folder is not None:
                kinds = {kind: partial(build, peer, kind, str(folder)) for kind in (False, True)}
                kinds_of[peer] = (False if quick else faster(kinds)), str(folder)
        candidates = {peer: partial(build, peer, *kind) for peer, kind in kinds_of.items()}
        timings: dict[str, Timing] = {}
        # A GPU's memory may not hold all of them, and its speed hardly varies.
        for some in [[peer] for peer in candidates] if on_gpu else [list(candidates)]:
            say(f"{precision}: stepping {', '.join(some)}")
            timings |= interleave({peer: candidates[peer]() for peer in some}, 3 if quick else 9)
        rows += timed_rows(timings, batch * context, "tokens/s", precision=precision, run="together")
        ratios |= against_best(f"step_{precision}_vs_best_peer", timings)
        if not on_gpu and not quick:
            say(f"{precision}: each in a process of its own")
            calls = {
                peer: partial(step_alone, peer, *kind, precision, batch, context)
                for peer, kind in kinds_of.items()
            }
            separate = interleave(calls, 3, warm_up=False)
            rows += timed_rows(separate, batch * context, "tokens/s", precision=precision, run="by itself")
            ratios |= against_best(f"step_{precision}_by_itself_vs_best_peer", separate)
        if on_gpu and (peak := peak_flops(precision)):
            best = batch * context / timings["ours"].median
            ratios[f"step_{precision}_mfu"] = best * flops_per_token(GPTConfig(), context) / peak
    return Report(
        title=f"A training step of GPT-2 small, {batch} x {context} tokens, on {device}",
        rows=rows,
        ratios=ratios,
        notes=["Forward, backward, clipping and update with fused AdamW. bf16 is autocast."],
        across=("precision", "tokens/s"),
    )


def against_best(name: str, timings: dict[str, Timing]) -> dict[str, float]:
    """How many times faster this program is than the fastest peer, under this name; empty without a peer."""
    others = [timings["ours"].times_faster_than(timings[peer]) for peer in timings if peer != "ours"]
    return {name: min(others)} if others else {}


def step_alone(peer: str, compiled: bool, folder: str, precision: str, batch: int, context: int) -> Seconds:
    """The median seconds of a step in a new process, whose allocator is set only by this program."""
    given = (peer, compiled, folder, precision, batch, context)
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); "
    code += f"from benchmarks.step import measure; measure{given!r}"
    return Seconds(run_python(["-c", code], ROOT).splitlines()[-1])


def measure(peer: str, compiled: bool, folder: str, precision: str, batch: int, context: int) -> None:
    """Print the median seconds of a step of this process."""
    if peer == "ours":
        keep_freed_memory()  # as `gpt fit` does
    step = step_of(peer, compiled, folder, precision=precision, device="cpu", batch=batch, context=context)
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    print(statistics.median(seconds[2:]))  # the first ones compile and fill caches


def faster(kinds: Mapping[bool, Callable[[], Callable[[], object]]]) -> bool:
    """Whether the compiled one is."""
    seconds = {}
    for kind, build in kinds.items():
        seconds[kind] = interleave({"alone": build()}, 3)["alone"].median
    return seconds[True] < seconds[False]


def model_of(peer: str, context: int, folder: str) -> Any:
    """A peer's model of the shape of GPT-2 small."""
    if peer == "transformers":
        from transformers import GPT2Config, GPT2LMHeadModel

        # Its own Trainer switches the cache off, too.
        config = GPT2Config(
            n_positions=context, use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
        )
        return GPT2LMHeadModel(config).train()
    if peer == "nanogpt":
        sys.path.insert(0, folder)
        from model import GPT, GPTConfig  # type: ignore[import-not-found]

        return GPT(GPTConfig(block_size=context, vocab_size=VOCABULARY, dropout=0.0, bias=True))
    sys.path.insert(0, str(Path(folder) / "pkg"))
    from llms_from_scratch.ch04 import GPTModel  # type: ignore[import-not-found]

    sizes = {"vocab_size": VOCABULARY, "context_length": context, "emb_dim": 768}
    return GPTModel({**sizes, "n_heads": 12, "n_layers": 12, "drop_rate": 0.0, "qkv_bias": True})


def step_of(
    peer: str, compiled: bool, folder: str = "", *, precision: str, device: str, batch: int, context: int
) -> Callable[[], None]:
    """A function that takes one step."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (batch, context + 1), device=device)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if peer == "ours":  # what `gpt fit` trains
        recipe = OptimizerConfig(name="adamw")
        module = LanguageModel(GPTConfig(context_length=context), recipe)
        module.to(device)
        if compiled:
            compile_model(module)
        optimizer: torch.optim.Optimizer = build_optimizer(module.model, recipe)
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

    def step() -> None:
        with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=precision == "bf16"):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)

    return step
