"""A machine for `gpt compare` and `scripts/panel.py` whose runs end at once, with made-up results."""

import math
from pathlib import Path

from gpt.files import write_json

OPTIONS = {
    "model": {"init_from": None},
    "data": {"corpus": "my.txt", "vocabulary": None, "val_fraction": None},
    "trainer": {"max_steps": 100, "accelerator": "cpu", "precision": "32-true"},
}


class Pretended:
    """A run of a variant on a text has the bits per byte and milliseconds of `reach`."""

    def __init__(self, reach, options=None) -> None:
        self.reach = reach
        self.changed = options or {}
        self.trained = []

    def options(self, variant):
        return {**OPTIONS, "words": list(variant.words), **self.changed.get(variant.name, {})}

    def train(self, training, folder, watch):
        steps = training.steps
        self.trained.append((training.candidate.variant.name, training.text.name, training.seed, steps))
        bits, milliseconds = self.reach(*self.trained[-1])
        run = folder / "runs" / training.name
        run.mkdir(parents=True)
        speed, half = 1e4 / milliseconds, steps // 2
        trained = [f"{step},{10 * step},{speed}," for step in (half, steps)]
        write_metrics(run, [*trained, f"{steps},{10 * steps},,{bits}"])
        loss = None if math.isnan(bits) else 3 * bits
        watch()
        write_json(
            run / "summary.json", {"val_loss": loss, "val_bits_per_byte": loss and bits, "best_loss": loss}
        )


def write_metrics(run: Path, rows: list[str]) -> None:
    text = "".join(f"{row}\n" for row in ["step,tokens,tokens_per_second,val_bits_per_byte", *rows])
    (run / "metrics.csv").write_text(text, "utf-8")
