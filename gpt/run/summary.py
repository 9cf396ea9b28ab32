"""What a person reads at the end of a run: its result, its size, its files, and what to do next."""

from typing import Any


def for_people(summary: dict[str, Any], folder: str, is_chat: bool) -> list[tuple[str, str]]:
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


def best_bits_per_byte(summary: dict[str, Any]) -> float | None:
    """Return the bits per byte of the best checkpoint; None if nothing was validated.

    The ratio of bits to loss is that of the last validation, which scored the same text.
    """
    bits, last, best = (summary[name] for name in ("val_bits_per_byte", "val_loss", "best_loss"))
    return None if bits is None or best is None else bits * best / (last or 1)


def minutes(seconds: float) -> str:
    """Return a time in words: seconds up to two minutes, then minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"


def _result(summary: dict[str, Any]) -> str:
    bits = best_bits_per_byte(summary)
    if bits is None:
        return "not validated: no text is held out, or the loss is not a number"
    error = summary["val_standard_error"]
    within = f" ± {error:.2g}" if error else ""
    at = "" if summary["best_step"] == summary["steps"] else f", best after step {summary['best_step']:,}"
    return f"{bits:.3f}{within} bits per byte of held-out text (lower is better){at}"
