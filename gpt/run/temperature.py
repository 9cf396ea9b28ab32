"""Temperature scaling, for a model that is overconfident after many epochs on its text."""

from copy import deepcopy

import torch

from gpt.data.prepared import Prepared
from gpt.evaluation.scoring import score_windows
from gpt.model import GPT

_STEP = 1.05
_SAMPLE = 4096  # tokens, enough to find the temperature within 1 %


def find_temperature(model: GPT, prepared: Prepared, isolate: bool = False) -> tuple[float, float]:
    """Find the temperature at which held-out text has the lowest loss (Guo et al. 2017, section 4.2).

    Returns the temperature (1, 1.05, 1.05 ** 2, ...) and a ratio: the loss on `_SAMPLE` held-out tokens with
    the logits divided by it, over the loss without. `isolate` keeps attention within documents, as in the
    run's validation. The model is not changed.
    """
    scaled = deepcopy(model).eval()
    nats = [_nats(scaled, prepared, isolate)]
    while True:
        divide_logits(scaled, _STEP)
        nats.append(_nats(scaled, prepared, isolate))
        if not nats[-1] < nats[-2]:
            return _STEP ** (len(nats) - 2), nats[-2] / nats[0]


@torch.no_grad()
def divide_logits(model: GPT, temperature: float) -> None:
    """Divide a model's logits by the temperature, by scaling the weights of its last norm."""
    for parameter in model.final_norm.parameters():
        parameter.div_(temperature)


def _nats(model: GPT, prepared: Prepared, isolate: bool) -> float:
    windows = score_windows(model, prepared, "val", _SAMPLE, isolate=isolate)
    return sum(float(nats.sum()) for nats, _ in windows)
