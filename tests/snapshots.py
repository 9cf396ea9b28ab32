"""A run with snapshots or a checkpoint, without training it."""

from pathlib import Path

from gpt import GPT, Tokenizer
from gpt.files import atomic_write
from gpt.weights.checkpoint import ModelPart, RunPart, write


def add_snapshot(run: Path, step: int, model: GPT, tokenizer: Tokenizer, loss: float = 5.0) -> Path:
    """Write `model` as the snapshot of a step, as `gpt fit` does."""
    path = run / "snapshots" / f"step-{step}-loss-{loss:.4f}.safetensors"
    return _save(path, model, tokenizer, None)


def add_checkpoint(run: Path, model: GPT, tokenizer: Tokenizer, state: RunPart) -> Path:
    """Write `model` as the last checkpoint of a run, without its optimizer."""
    return _save(run / "checkpoints" / "last.safetensors", model, tokenizer, state)


def _save(path: Path, model: GPT, tokenizer: Tokenizer, run: RunPart | None) -> Path:
    unknown = dict.fromkeys(("template", "adapters"))
    part = ModelPart(config=model.config.to_dict(), tokenizer=tokenizer.to_dict(), **unknown)
    state = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    if model.config.tie_embeddings:
        del state["head.weight"]
    with atomic_write(path, "wb") as file:
        write(file, state, part, run)
    return path
