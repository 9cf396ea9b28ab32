"""`benchmark.py generate`: greedy generation beside transformers and llama.cpp; GPT-2 small, random weights.

Each round times every candidate once on the same prompts. A time covers the whole call including the prompt.
The compiled program is built, and compared with the model, before. Five minutes on two cores.
"""

import copy
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import Report, Seconds, Timing, interleave, say, synchronize, timed_rows

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.generation import build, for_decoding
from gpt.generation.compiled import Compiled
from gpt.generation.decoding import BackendName, backend_of, suits_program
from gpt.training.device import cpu_multiplies_bfloat16
from gpt.weights.formats import gguf
from gpt.weights.rounding import WeightPrecision

# These are the bytes of a weight. With int4 the head, 31 % of GPT-2 small's weights, is in int8.
BYTES: dict[WeightPrecision, float] = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.68}
SHORT: dict[WeightPrecision, str] = {"float32": "fp32", "bfloat16": "bf16", "int8": "int8", "int4": "int4"}
LLAMA: dict[WeightPrecision, str] = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
PLAIN: tuple[WeightPrecision, ...] = ("float32", "bfloat16")  # which PyTorch computes with
PAIRS = (
    ("this program", "llama.cpp", "vs_llamacpp"),
    ("this program", "transformers", "vs_transformers"),
    ("by PyTorch", "transformers", "pytorch_vs_transformers"),
)
MEMORY = "reading memory once for each text"
PROMPT = 32
ROUNDS = {1: 5, 8: 3}  # by the texts at a time
Candidates = dict[str, Callable[[], object]]


def run(quick: bool, device: str = "cpu", llamacpp: Path | None = None) -> Report:
    """Measure the speed, and how much of the memory's it is."""
    torch.manual_seed(0)
    config = GPTConfig(num_layers=2 if quick else 12)
    model = GPT(config).eval().to(device)
    new = 8 if quick else 64
    rounds = dict.fromkeys(ROUNDS, 2) if quick else ROUNDS
    rows = []
    theirs = {kind: their_model(config, getattr(torch, kind)).to(device) for kind in PLAIN}
    plain = {kind: for_decoding(copy.deepcopy(model), kind) for kind in PLAIN}
    ready = {}
    for name in BYTES if device == "cpu" else PLAIN:
        ready[name] = for_decoding(copy.deepcopy(model), name)
        build_program(ready[name])

    def race(
        count: int, longest: int, kinds: Collection[WeightPrecision], more: Candidates
    ) -> dict[str, Timing]:
        """Time all on prompts of which the shortest is half as long as the longest; their rows are added.

        PyTorch's ways are timed in the first of the kinds, our own only with short prompts.
        """
        setting = f"prompts to {longest}, batch {count}"
        say(setting)
        lengths = [longest - i * longest // (2 * count) for i in range(count)]
        prompts = [torch.randint(0, config.vocab_size, (length,)).tolist() for length in lengths]
        first = next(iter(kinds))
        candidates: Candidates = {
            f"this program, {kind}": partial(our_text, ready[kind], prompts, new) for kind in kinds
        }
        if longest == PROMPT:
            candidates[f"by PyTorch, {first}"] = partial(our_text, plain[first], prompts, new, "pytorch")
        candidates[f"transformers, {first}"] = partial(their_text, theirs[first], prompts, new)
        taken = interleave({**candidates, **more}, rounds[count])
        rows.extend(rows_of({name: taken[name] for name in taken if name != MEMORY}, count * new, setting))
        return taken

    with tempfile.TemporaryDirectory() as folder:
        others: Candidates = {MEMORY: partial(read_memory, device)}
        if llamacpp and device == "cpu":
            for kind, file in their_files(llamacpp, Path(folder), model).items():
                others[f"llama.cpp, {kind}"] = partial(llama_seconds, llamacpp, file, new)
        one = race(1, PROMPT, ready, others)
    longest = 64 if quick else 512
    fast = device != "cpu" or cpu_multiplies_bfloat16()  # else transformers takes a minute for a text
    kind = "bfloat16" if fast else "float32"
    eight, long = (race(8, most, [kind], {}) for most in (PROMPT, longest))

    ratios: dict[str, float] = {}
    weights = model.num_parameters() - model.position_embedding.weight.numel()  # that each token reads
    memory = one[MEMORY].seconds
    for batch, taken in (("b1", one), ("b8", long), ("b8_short", eight)):
        for name, short in SHORT.items():
            for ours, other, figure in PAIRS:
                if {f"{ours}, {name}", f"{other}, {name}"} <= taken.keys():
                    ratio = taken[f"{ours}, {name}"].times_faster_than(taken[f"{other}, {name}"])
                    ratios[f"{batch}_{short}_{figure}"] = ratio
    for name in ready:
        fractions = [
            new * weights * BYTES[name] / ours / (memory_bytes(device) / seconds)
            for ours, seconds in zip(one[f"this program, {name}"].seconds, memory, strict=True)
        ]
        ratios[f"b1_{SHORT[name]}_bandwidth_fraction"] = statistics.median(fractions)
    if device == "cpu":
        ratios["int8_vs_bf16"] = one["this program, int8"].times_faster_than(one["this program, bfloat16"])
        ratios["int4_vs_int8"] = one["this program, int4"].times_faster_than(one["this program, int8"])
        small = small_model(2 if quick else 9)
        rows += rows_of(small, 64, "0.9 million weights, batch 1")
        program, pytorch = small.values()
        ratios["small_program_vs_pytorch"] = program.times_faster_than(pytorch)
    return Report(
        title=f"Generation, GPT-2 small, {new} new tokens, on {device}",
        rows=rows,
        ratios=ratios,
        notes=[
            f"Memory read: {memory_bytes(device) / statistics.median(memory) / 1e9:.1f} GB/s.",
            f"Rounds: {rounds[1]} with batch 1, {rounds[8]} with batch 8.",
        ],
        across=("precision", "tokens/s"),
    )


def rows_of(timings: dict[str, Timing], tokens: int, setting: str) -> list[dict[str, Any]]:
    """A row for each candidate, which is named by its program and precision."""
    rows = []
    for row in timed_rows(timings, tokens, "tokens/s"):
        program, _, precision = row.pop("candidate").partition(", ")
        rows.append({"setting": setting, "program": program, "precision": precision, **row})
    return rows


def build_program(model: GPT) -> None:
    """Build the compiled program where the model suits it, and compare the two."""
    if suits_program(model):
        build.build()
        say(f"uses the compiled program: {isinstance(backend_of(model), Compiled)}")


def small_model(rounds: int) -> dict[str, Timing]:
    """A model as a plan of two minutes has it, with the compiled program and with PyTorch only."""
    config = GPTConfig(vocab_size=4096, context_length=128, emb_dim=128, num_heads=4, num_layers=2)
    compiled, plain = GPT(config).eval(), GPT(config).eval()
    build_program(compiled)
    texts = {
        "this program, float32": partial(our_text, compiled, [[1]], 64, "auto"),
        "by PyTorch, float32": partial(our_text, plain, [[1]], 64, "pytorch"),
    }
    return interleave(texts, rounds)


def our_text(model: GPT, prompts: list[list[int]], new: int, backend: BackendName = "auto") -> None:
    """Greedy text of this package."""
    generate(model, prompts, max_new_tokens=new, temperature=0, backend=backend)


def their_files(programs: Path, folder: Path, model: GPT) -> dict[WeightPrecision, Path]:
    """The model in llama.cpp's format, in each of its precisions."""
    gguf.write(model.config, model.state_dict(), folder, Tokenizer(), None)
    files = {kind: folder / f"{name}.gguf" for kind, name in LLAMA.items()}
    (folder / "model.gguf").rename(files["float32"])
    for kind in list(files)[1:]:
        command: list[str | Path] = [programs / "llama-quantize", files["float32"], files[kind], LLAMA[kind]]
        subprocess.run(command, check=True, capture_output=True)
    return files


def llama_seconds(programs: Path, file: Path, new: int) -> Seconds:
    """llama.cpp reads a prompt and writes `new` tokens; it times that itself, after loading the weights."""
    sizes = ("-p", "0", "-n", "0", "-pg", f"{PROMPT},{new}", "-r", "1", "-t", str(torch.get_num_threads()))
    command: list[str | Path] = [programs / "llama-bench", "-m", file, *sizes, "-o", "json"]
    told = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    return Seconds(json.loads(told)[0]["avg_ns"] / 1e9)


def their_model(config: GPTConfig, dtype: torch.dtype) -> Any:
    """transformers' model of the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config(n_layer=config.num_layers, bos_token_id=None, eos_token_id=None))
    return theirs.to(dtype).eval()


def their_text(model: Any, prompts: list[list[int]], new: int) -> None:
    """Greedy text of transformers, padded on the left."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(tokens, attention_mask=mask, **options)
    synchronize(tokens.device.type)


_memory: list[torch.Tensor] = []


def memory_bytes(device: str) -> int:
    """Half a gigabyte, and four on a GPU, which else waits as long as it reads."""
    return 1 << (29 if device == "cpu" else 32)


def read_memory(device: str) -> float:
    """Read so much once. A product with a vector reads faster than a sum, which does not saturate memory."""
    if not _memory:
        _memory.append(torch.ones(memory_bytes(device) // 4, device=device).view(-1, 1024))
        _memory.append(torch.ones(1024, device=device))
    return torch.mv(*_memory)[0].item()
