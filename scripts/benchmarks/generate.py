"""`benchmark.py generate`: greedy generation beside `transformers`; GPT-2 small, random weights.

Each round times every candidate once on the same prompts. A time covers the whole call including the prompt.
Weights are packed for decoding once, which is timed separately.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Report, interleave, say, synchronize

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.generation import Engine, Request, Sampling, for_decoding

GREEDY = Sampling(temperature=0)


def run(quick: bool, device: str = "cpu") -> Report:
    """Measure speed, memory bandwidth, late tokens, the first token, and the loss in int8."""
    torch.manual_seed(0)
    config = GPTConfig.from_name("gpt2-small", **({"num_layers": 2} if quick else {}))
    model = GPT(config).eval().to(device)
    theirs = {kind: their_model(config, getattr(torch, kind)).to(device) for kind in ("float32", "bfloat16")}
    rows: list[dict[str, Any]] = []
    ready = {}
    for kind in ("float32", "bfloat16", "int8") if device == "cpu" else ("float32", "bfloat16"):
        began = time.perf_counter()
        ready[kind] = decoder(model, kind)
        say(f"{kind} weights packed in {time.perf_counter() - began:.2f} s")

    rounds, new = (2, 8) if quick else (5, 64)
    prompt = torch.randint(0, config.vocab_size, (1, 32))
    say("batch 1, prompt 32")
    candidates: dict[str, Callable[[], object]] = {
        f"this program, {kind}": lambda kind=kind: generate(
            ready[kind], prompt, max_new_tokens=new, temperature=0
        )
        for kind in ready
    }
    candidates |= {
        f"transformers, {kind}": lambda kind=kind: their_text(theirs[kind], prompt.to(device), None, new)
        for kind in theirs
    }
    candidates["memory"] = lambda: read_memory(device)
    one = interleave(candidates, rounds)
    bandwidth = {i: MEMORY_BYTES / seconds for i, seconds in one.pop("memory").seconds.items()}
    for name, timing in one.items():
        rows.append(row("prompt 32, batch 1", name, new / timing.median, timing.spread))

    say("\n".join(f"  {entry['candidate']}: {entry['tokens/s']:.1f} tokens/s" for entry in rows))
    say("batch 8, prompts of 288 to 512")
    longest = 64 if quick else 512
    prompts = [torch.randint(0, config.vocab_size, (longest - i * longest // 16,)).tolist() for i in range(8)]
    padded, mask = pad_left(prompts)
    eight = interleave(
        {
            "this program, bfloat16": lambda: generate(
                ready["bfloat16"], prompts, max_new_tokens=new, temperature=0
            ),
            "transformers, bfloat16": lambda: their_text(
                theirs["bfloat16"], padded.to(device), mask.to(device), new
            ),
        },
        2 if quick else 3,
    )
    for name, timing in eight.items():
        rows.append(row("prompts to 512, batch 8", name, 8 * new / timing.median, timing.spread))

    # Every token reads all matrices, including the head, in bfloat16.
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name
    )
    matrices += model.token_embedding.weight.numel()  # the head
    bound = {i: read / (2 * matrices) for i, read in bandwidth.items()}  # tokens a second
    reached = one["this program, bfloat16"].seconds
    fraction = statistics.median(new / reached[i] / bound[i] for i in bound)

    say("\n".join(f"  {entry['candidate']}: {entry['tokens/s']:.1f} tokens/s" for entry in rows[-2:]))
    say("late tokens, first token, int8's loss")
    late = late_over_early(ready["bfloat16"], quick)
    first = first_over_forward(ready["bfloat16"], quick)
    loss = bits_per_byte(model, ready)
    ratios = {
        "b1_fp32_vs_transformers": one["this program, float32"].times_faster_than(
            one["transformers, float32"]
        ),
        "b1_bf16_vs_transformers": one["this program, bfloat16"].times_faster_than(
            one["transformers, bfloat16"]
        ),
        "b1_bf16_bandwidth_fraction": fraction,
        "b8_bf16_vs_transformers": eight["this program, bfloat16"].times_faster_than(
            eight["transformers, bfloat16"]
        ),
        **late,
        "forward_vs_first_token": 1 / first,
    }
    if "int8" in ready:
        bfloat16 = one["this program, bfloat16"]
        ratios["int8_vs_bf16"] = one["this program, int8"].times_faster_than(bfloat16)
    return Report(
        title=f"Generation, GPT-2 small, {new} new tokens, on {device}",
        rows=rows,
        ratios=ratios,
        bars={"prompt 32, batch 1": {name: new / t.median for name, t in one.items()}},
        unit="tokens per second",
        notes=[
            f"Memory read: {statistics.median(bandwidth.values()) / 1e9:.1f} GB/s, so at most "
            f"{statistics.median(bound.values()):.0f} tokens per second in bfloat16.",
            "Bits per byte of the same text under the same random weights: "
            + ", ".join(f"{kind} {value:.4f}" for kind, value in loss.items())
            + ".",
        ],
    )


def decoder(model: GPT, kind: str) -> GPT:
    """The model prepared for decoding: packed on a CPU, a copy in another type on a GPU."""
    if model.head.weight.device.type == "cpu":
        return for_decoding(model, kind)
    return copy.deepcopy(model).to(getattr(torch, kind))


def row(setting: str, name: str, speed: float, spread: float) -> dict[str, Any]:
    return {"setting": setting, "candidate": name, "tokens/s": speed, "spread": spread}


def their_model(config: GPTConfig, dtype: torch.dtype) -> Any:
    """transformers' model of the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config(n_layer=config.num_layers, bos_token_id=None, eos_token_id=None))
    return theirs.to(dtype).eval()


def their_text(model: Any, tokens: torch.Tensor, mask: torch.Tensor | None, new: int) -> torch.Tensor:
    mask = torch.ones_like(tokens) if mask is None else mask
    with torch.inference_mode():
        return model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )


def pad_left(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, (B, T), as `transformers` expects them."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return tokens, mask


MEMORY_BYTES = 1 << 29
_memory: list[torch.Tensor] = []


def read_memory(device: str) -> float:
    """Read half a gigabyte once."""
    if not _memory:
        _memory.append(torch.ones(MEMORY_BYTES // 4, device=device))
    return _memory[0].sum().item()


def late_over_early(model: GPT, quick: bool) -> dict[str, float]:
    """The cost of the 1,000th token relative to the 100th, with and without the cost of attention itself.

    Two texts get a token in turn, so that both see the same machine.
    """
    from torch.nn import functional as F

    steps = 10 if quick else 60
    lengths = {"early": 100 - steps // 2, "late": (200 if quick else 1000) - steps // 2}
    engines = {}
    for name, length in lengths.items():
        engine = engines[name] = Engine(model)
        prompt = torch.randint(0, model.config.vocab_size, (length,)).tolist()
        engine.add(Request(tokens=prompt, max_new_tokens=steps + 2, sampling=GREEDY))
        while not engine.running:
            engine.step()
    cost = {
        name: timing.median
        for name, timing in interleave({n: e.step for n, e in engines.items()}, steps).items()
    }
    heads, width = model.config.num_heads, model.config.emb_dim // model.config.num_heads

    def attention(length: int) -> float:
        """Seconds of one query's attention over `length` keys in all layers, by the faster of two ways."""
        device = model.head.weight.device
        query = torch.randn(1, heads, 1, width, device=device)
        caches = [
            torch.randn(2, 1, heads, length, width, device=device) for _ in range(model.config.num_layers)
        ]
        ways = (
            lambda keys, values: F.scaled_dot_product_attention(query, keys, values),
            lambda keys, values: (query @ keys.transpose(-2, -1)).softmax(-1) @ values,
        )
        taken = []
        for way in ways:
            each = []
            for _ in range(20):
                began = time.perf_counter()
                for keys, values in caches:
                    way(keys, values)
                synchronize(device.type)
                each.append(time.perf_counter() - began)
            taken.append(statistics.median(each))
        return min(taken)

    with torch.inference_mode():
        must = attention(lengths["late"]) - attention(lengths["early"])
    return {
        "late_vs_early": cost["late"] / cost["early"],
        "late_vs_early_beyond_attention": (cost["late"] - must) / cost["early"],
    }


def first_over_forward(model: GPT, quick: bool) -> float:
    """Time to the first token of a 512-token prompt, relative to a forward pass over it."""
    prompt = torch.randint(0, model.config.vocab_size, (1, 64 if quick else 512))

    def forward() -> None:
        with torch.inference_mode():
            model(prompt.to(model.position_embedding.weight.device)).sum().item()

    timings = interleave(
        {
            "first": lambda: generate(model, prompt, max_new_tokens=1, temperature=0),
            "forward": forward,
        },
        3 if quick else 7,
    )
    return 1 / timings["first"].times_faster_than(timings["forward"])


def bits_per_byte(model: GPT, ready: dict[str, GPT]) -> dict[str, float]:
    """Bits per byte of this file, by precision.

    The weights are random, so only the difference to float32 is meaningful.
    """
    tokenizer = Tokenizer()
    text = Path(__file__).read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer.encode(text)[:1024]], device=model.head.weight.device)
    size = len(tokenizer.decode_bytes(ids[0, 1:].tolist()))
    found = {}
    with torch.inference_mode():
        for kind, one in {"exact": model, **ready}.items():
            logits = one(ids)[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            found[kind] = loss.item() / math.log(2) / size
    return found
