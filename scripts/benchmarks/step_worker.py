"""One candidate of `benchmark.py step`, a process that builds a GPT-2 small and steps it on request.

Arguments: PEER PRECISION COMPILED DEVICE BATCH CONTEXT FOLDER. It answers a line "step" on standard
input with the seconds of one step, and "memory" with the peak in bytes.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the package need not be installed

import torch
from torch import Tensor
from torch.nn import functional as F

BATCH, CONTEXT, VOCABULARY = 4, 256, 50257
PARAMETERS, LAYERS, WIDTH = 124_439_808, 12, 768


def flops_per_token(context: int) -> float:
    """6 N + 12 L d T: the products with the weights and attention's own, forward and backward."""
    return 6 * PARAMETERS + 12 * LAYERS * WIDTH * context


def ours(precision: str, compiled: bool, device: str, context: int, folder: str) -> tuple[Any, Any, Any]:
    """The module that `gpt fit` trains, its loss and its optimizer."""
    from gpt.config import GPTConfig
    from gpt.training.compilation import compile_model
    from gpt.training.device import keep_freed_memory
    from gpt.training.module import LanguageModel
    from gpt.training.optimizers import OptimizerConfig, build_optimizer

    keep_freed_memory()
    recipe = OptimizerConfig(name="adamw")
    module = LanguageModel(GPTConfig(context_length=context), recipe)
    module.to(device)
    if precision == "bf16-master":
        module.bfloat16()
    if compiled:
        compile_model(module)
    return module, module.loss, build_optimizer(module.model, recipe)


def transformers(
    precision: str, compiled: bool, device: str, context: int, folder: str
) -> tuple[Any, Any, Any]:
    """transformers' GPT2LMHeadModel."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_positions=context, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    model = GPT2LMHeadModel(config).to(device).train()
    forward = torch.compile(model) if compiled else model

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = forward(batch[0]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    return model, loss, _adamw(model.parameters())


def nanogpt(precision: str, compiled: bool, device: str, context: int, folder: str) -> tuple[Any, Any, Any]:
    """nanoGPT's GPT with its own optimizer settings, from a checkout."""
    sys.path.insert(0, folder)
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    model = GPT(GPTConfig(block_size=context, vocab_size=VOCABULARY, dropout=0.0, bias=True)).to(device)
    forward = torch.compile(model) if compiled else model
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda" if device != "cpu" else "cpu")
    return model, lambda batch: forward(*batch)[1], optimizer


def book(precision: str, compiled: bool, device: str, context: int, folder: str) -> tuple[Any, Any, Any]:
    """GPTModel of LLMs-from-scratch, from a checkout."""
    sys.path.insert(0, str(Path(folder) / "pkg"))
    from llms_from_scratch.ch04 import GPTModel  # type: ignore[import-not-found]

    model = GPTModel(
        {
            "vocab_size": VOCABULARY,
            "context_length": context,
            "emb_dim": WIDTH,
            "n_heads": 12,
            "n_layers": LAYERS,
            "drop_rate": 0.0,
            "qkv_bias": True,
        }
    ).to(device)
    forward = torch.compile(model) if compiled else model

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(forward(batch[0]).flatten(0, 1), batch[1].flatten())

    return model, loss, _adamw(model.parameters())


def _adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def main() -> None:
    """Build the candidate and answer requests."""
    answers, sys.stdout = sys.stdout, sys.stderr  # some peers print while they are built
    peer, precision, compiled, device, batch, context, folder = sys.argv[1:]
    on_gpu = device.startswith("cuda")
    torch.manual_seed(0)
    if on_gpu:
        torch.set_float32_matmul_precision("high")  # TF32, for every candidate alike
    build: Callable[..., tuple[Any, Any, Any]] = globals()[peer]
    module, loss_of, optimizer = build(precision, compiled == "1", device, int(context), folder)
    tokens = torch.randint(0, VOCABULARY, (int(batch), int(context) + 1), device=device)
    pair = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    autocast = (
        torch.autocast(device.split(":")[0], torch.bfloat16)
        if precision == "bf16-autocast"
        else nullcontext()
    )

    def step() -> float:
        began = time.perf_counter()
        with autocast:
            loss = loss_of(pair)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for line in sys.stdin:
        if line.strip() == "step":
            print(step(), file=answers, flush=True)
        elif on_gpu:
            print(torch.cuda.max_memory_allocated(), file=answers, flush=True)
        else:
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, file=answers, flush=True)


if __name__ == "__main__":
    main()
