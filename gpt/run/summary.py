"""The result of a run: summary.json, and the lines that a person reads at the end."""

from typing import TypedDict

from gpt.weights.figures import bits_of_best

Figures = dict[str, float | None]


class _Result(TypedDict):
    text: str
    """The name of the corpus."""
    val_loss: float | None
    """Nats per token at the last validation."""
    val_bits_per_byte: float | None
    val_standard_error: float | None
    """Standard error of the bits per byte."""
    best_loss: float | None
    """The lowest `val_loss`; with temperature scaling, the scaled one."""
    best_step: int
    train_seconds: float
    """Seconds of training and validation, over all resumes."""
    steps: int
    tokens: int
    tokens_per_second: int
    peak_memory_bytes: int
    """0 if the system does not tell it."""
    parameters: int
    device: str
    precision: str


class Summary(_Result, total=False):
    """The content of summary.json."""

    planned: Figures
    """The seconds and steps that a planned run was given."""
    reached: Figures
    """The seconds and steps that it has taken, and the bits per byte of its best checkpoint."""


def for_people(summary: Summary, folder: str, is_chat: bool) -> list[tuple[str, str]]:
    """Return lines of a label and a text for the figures of summary.json."""
    how = "--interactive" if is_chat else "--prompt 'The'"
    trained = (
        f"{summary['steps']:,} steps in {minutes(summary['train_seconds'])}: "
        f"{summary['parameters']:,} parameters, {summary['tokens']:,} tokens of {summary['text']}"
    )
    return [
        ("result", _result(summary)),
        ("trained", trained),
        ("saved", f"{folder}/ has the checkpoints, loss.png, metrics.csv, samples.txt and summary.json"),
        ("next", f"gpt generate --checkpoint {folder} {how}"),
    ]


def best_bits_per_byte(summary: Summary) -> float | None:
    """Return the bits per byte of the best checkpoint; None if nothing was validated."""
    return bits_of_best(summary["val_bits_per_byte"], summary["val_loss"], summary["best_loss"])


def minutes(seconds: float) -> str:
    """Return a time in words: seconds up to two minutes, then minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"


def _result(summary: Summary) -> str:
    bits = best_bits_per_byte(summary)
    if bits is None:
        return "not validated: no text is held out, or the loss is not a number"
    error = summary["val_standard_error"]
    within = f" ± {error:.2g}" if error else ""
    at = "" if summary["best_step"] == summary["steps"] else f", best after step {summary['best_step']:,}"
    return f"{bits:.3f}{within} bits per byte of held-out text (lower is better){at}"
