"""A run with snapshots, without training it."""

from pathlib import Path

from gpt.run.save import AtomicCheckpointIO

from gpt import GPT, Tokenizer


def add_snapshot(run: Path, step: int, model: GPT, tokenizer: Tokenizer, loss: float = 5.0) -> Path:
    """Write `model` as the snapshot of a step, as `gpt fit` does."""
    part = {"config": model.config.to_dict(), "tokenizer": tokenizer.to_dict()}
    state = {f"model.{name}": weight.bfloat16() for name, weight in model.state_dict().items()}
    path = run / "snapshots" / f"step-{step}-loss-{loss:.4f}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    AtomicCheckpointIO().save_checkpoint({"gpt": part, "state_dict": state}, path)
    return path
