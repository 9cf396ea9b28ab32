"""A run with snapshots, without training it."""

from pathlib import Path

from gpt import GPT, Tokenizer
from gpt.run.checkpoint import save
from gpt.weights.checkpoint import ModelPart


def add_snapshot(run: Path, step: int, model: GPT, tokenizer: Tokenizer, loss: float = 5.0) -> Path:
    """Write `model` as the snapshot of a step, as `gpt fit` does."""
    unknown = dict.fromkeys(("template", "adapters"))
    part = ModelPart(config=model.config.to_dict(), tokenizer=tokenizer.to_dict(), **unknown)
    state = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    if model.config.tie_embeddings:
        del state["head.weight"]
    path = run / "snapshots" / f"step-{step}-loss-{loss:.4f}.safetensors"
    save(path, state, part, None)
    return path
