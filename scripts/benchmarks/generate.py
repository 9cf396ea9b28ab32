"""`benchmark.py generate`: greedy generation beside transformers and llama.cpp; GPT-2 small, random weights.

Each round times every candidate once on the same prompts. A time covers the whole call including the prompt.
The compiled program is built, and compared with the model, before.
"""

import copy
import json
import math
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.common import Report, Seconds, interleave, say, synchronize

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.generation import Engine, Request, Sampling, build, for_decoding
from gpt.generation.compiled import Compiled
from gpt.generation.decoding import decoder_of, suits_program
from gpt.weights.formats import gguf

GREEDY = Sampling(temperature=0)
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # of a weight
SHORT = {"float32": "fp32", "bfloat16": "bf16", "int8": "int8"}
LLAMA = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
PROMPT = 32
Candidates = dict[str, Callable[[], object]]


def run(quick: bool, device: str = "cpu", llamacpp: Path | None = None) -> Report:
    """Measure speed, memory bandwidth, late tokens, the first token, and the loss in int8."""
    torch.manual_seed(0)
    config = GPTConfig.from_name("gpt2-small", **({"num_layers": 2} if quick else {}))
    model = GPT(config).eval().to(device)
    theirs = {kind: their_model(config, getattr(torch, kind)).to(device) for kind in ("float32", "bfloat16")}
    ready, rounds, new = {}, 2 if quick else 5, 8 if quick else 64
    for kind in BYTES if device == "cpu" else theirs:
        ready[kind] = for_decoding(copy.deepcopy(model), kind)
        build_program(ready[kind])

    rows: list[dict[str, Any]] = []
    bars: dict[str, dict[str, float]] = {}

    def race(
        setting: str, prompts: list[list[int]], kinds: Sequence[str], more: Candidates, rounds: int
    ) -> Any:
        """Time all on the prompts, transformers in some `kinds` only, and add their rows to the report."""
        say(setting)
        tokens, mask = (tensor.to(device) for tensor in pad_left(prompts))
        candidates: Candidates = {
            f"this program, {kind}": lambda fast=fast: generate(
                fast, prompts, max_new_tokens=new, temperature=0
            )
            for kind, fast in ready.items()
        }
        for kind in kinds:
            candidates[f"transformers, {kind}"] = partial(their_text, theirs[kind], tokens, mask, new)
        taken = interleave({**candidates, **more}, rounds)
        bars[setting] = {}
        for name, timing in taken.items():
            if name != "memory":
                speed = bars[setting][name] = len(prompts) * new / timing.median
                row = {"setting": setting, "candidate": name, "tokens/s": speed, "spread": timing.spread}
                rows.append(row)
                say(f"  {name}: {speed:.1f} tokens/s")
        return taken

    def prompts(count: int, longest: int) -> list[list[int]]:
        """The shortest is half as long as the longest."""
        lengths = [longest - i * longest // (2 * count) for i in range(count)]
        return [torch.randint(0, config.vocab_size, (length,)).tolist() for length in lengths]

    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        llama = their_files(llamacpp, Path(folder), model) if llamacpp and device == "cpu" else {}
        others: Candidates = {
            f"llama.cpp, {kind}": partial(llama_seconds, llamacpp, file, new) for kind, file in llama.items()
        }
        others["memory"] = partial(read_memory, device)
        one = race(f"prompt {PROMPT}, batch 1", prompts(1, PROMPT), list(theirs), others, rounds)
    longest, few = (64, 2) if quick else (512, 3)
    eight, sixteen, long = (
        race(f"prompts to {most}, batch {batch}", prompts(batch, most), ["bfloat16"], {}, few)
        for batch, most in ((8, PROMPT), (16, PROMPT), (8, longest))
    )

    ours = {kind: one[f"this program, {kind}"] for kind in ready}
    for kind, short in SHORT.items():
        for name in ("transformers", "llama.cpp"):
            if kind in ours and (other := one.get(f"{name}, {kind}")):
                ratios[f"b1_{short}_vs_{name.replace('.', '')}"] = ours[kind].times_faster_than(other)
    for batch, taken in (("b8", long), ("b8_short", eight), ("b16_short", sixteen)):
        other = taken["transformers, bfloat16"]
        ratios[f"{batch}_bf16_vs_transformers"] = taken["this program, bfloat16"].times_faster_than(other)
    # Every token reads all matrices, of the embeddings the head's alone.
    weights = model.num_parameters() - model.position_embedding.weight.numel()
    read = {i: memory_bytes(device) / seconds / weights for i, seconds in one["memory"].seconds.items()}
    for kind, timing in ours.items():
        fractions = [new / timing.seconds[i] * BYTES[kind] / read[i] for i in read]
        ratios[f"b1_{SHORT[kind]}_bandwidth_fraction"] = statistics.median(fractions)
    if "int8" in ready:
        ratios["int8_vs_bf16"] = ours["int8"].times_faster_than(ours["bfloat16"])

    if device == "cpu":
        small = small_model("1.7 million weights, batch 1", 2 if quick else 9)
        ratios["small_program_vs_pytorch"] = small[0]["tokens/s"] / small[1]["tokens/s"]
        rows += small
    say("late tokens, first token, int8's loss")
    ratios |= late_over_early(ready["bfloat16"], quick)
    ratios["forward_vs_first_token"] = 1 / first_over_forward(ready["bfloat16"], quick)
    loss, speed = bits_per_byte(model, ready), statistics.median(read.values()) * weights
    bounds = ", ".join(f"{speed / weights / BYTES[kind]:.0f} in {kind}" for kind in ready)
    return Report(
        title=f"Generation, GPT-2 small, {new} new tokens, on {device}",
        rows=rows,
        ratios=ratios,
        bars=bars,
        unit="tokens per second",
        notes=[
            f"Memory read: {speed / 1e9:.1f} GB/s; the most tokens per second at batch 1: {bounds}.",
            "Bits per byte of the same text under the same random weights: "
            + ", ".join(f"{kind} {value:.4f}" for kind, value in loss.items())
            + ".",
        ],
    )


def build_program(model: GPT) -> None:
    """Build the compiled program where the model suits it, and compare the two."""
    if suits_program(model):
        began = time.perf_counter()
        build.build()
        built = time.perf_counter()
        way = decoder_of(model).way(model)
        say(
            f"program built in {built - began:.1f} s, compared with the model in "
            f"{time.perf_counter() - built:.3f} s, used: {isinstance(way, Compiled)}"
        )


def small_model(setting: str, rounds: int) -> list[dict[str, Any]]:
    """A model as `make train` makes it, with the compiled program and by PyTorch alone."""
    config = GPTConfig(vocab_size=2048, context_length=128, emb_dim=128, num_heads=4, num_layers=7)
    models = {"with the program": GPT(config).eval(), "by PyTorch": GPT(config).eval()}
    build_program(models["with the program"])

    def text(name: str) -> None:
        there = nullcontext() if "program" in name else patch.object(build, "program", lambda: None)
        with there:
            generate(models[name], [[1, 2, 3]], max_new_tokens=64, temperature=0)

    for name in models:
        text(name)  # compares ways
    taken = interleave({name: partial(text, name) for name in models}, rounds)
    return [
        {"setting": setting, "candidate": name, "tokens/s": 64 / timing.median, "spread": timing.spread}
        for name, timing in taken.items()
    ]


def their_files(programs: Path, folder: Path, model: GPT) -> dict[str, Path]:
    """The model in llama.cpp's format, in each of its precisions."""
    gguf.write(model.config, model.state_dict(), folder, Tokenizer(), None)
    files = {kind: folder / f"{name}.gguf" for kind, name in LLAMA.items()}
    (folder / "model.gguf").rename(files["float32"])
    for kind in list(files)[1:]:
        command = [programs / "llama-quantize", files["float32"], files[kind], LLAMA[kind]]
        subprocess.run(command, check=True, capture_output=True)
    return files


def llama_seconds(programs: Path, file: Path, new: int) -> Seconds:
    """llama.cpp reads a prompt and writes `new` tokens; it times that itself, after loading the weights."""
    sizes = ("-p", "0", "-n", "0", "-pg", f"{PROMPT},{new}", "-r", "1", "-t", str(torch.get_num_threads()))
    command = [programs / "llama-bench", "-m", file, *sizes, "-o", "json"]
    told = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    return Seconds(json.loads(told)[0]["avg_ns"] / 1e9)


def their_model(config: GPTConfig, dtype: torch.dtype) -> Any:
    """transformers' model of the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config(n_layer=config.num_layers, bos_token_id=None, eos_token_id=None))
    return theirs.to(dtype).eval()


def their_text(model: Any, tokens: torch.Tensor, mask: torch.Tensor | None, new: int) -> torch.Tensor:
    mask = torch.ones_like(tokens) if mask is None else mask
    with torch.inference_mode():
        text = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
    synchronize(tokens.device.type)
    return text


def pad_left(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, (B, T), as `transformers` expects them."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return tokens, mask


_memory: list[torch.Tensor] = []


def memory_bytes(device: str) -> int:
    """Half a gigabyte, and four on a GPU, which else waits as long as it reads."""
    return 1 << (29 if device == "cpu" else 32)


def read_memory(device: str) -> float:
    """Read so much once."""
    if not _memory:
        _memory.append(torch.ones(memory_bytes(device) // 4, device=device))
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
        engine._ahead = 1  # a token in each call, on a GPU too
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
    ids = tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))[: model.config.context_length]
    size = len(tokenizer.decode_bytes(ids[1:]))
    found = {}
    for kind, one in {"exact": model, **ready}.items():
        engine = Engine(one)  # int8 is the program's alone
        engine.add(Request(tokens=ids, max_new_tokens=0, echo=True, alternatives=0))
        nats = -sum(token.log_probability or 0.0 for token in engine.run())
        found[kind] = nats / math.log(2) / size
    return found
