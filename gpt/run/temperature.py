"""Temperature scaling, for a model that is too sure of itself as it has read its text too often."""

from copy import deepcopy

import torch

from gpt.data.shards import Prepared
from gpt.evaluation.scoring import score_windows
from gpt.model import GPT

_STEP = 1.05
_SAMPLE = 4096  # tokens: they tell the temperature within a hundredth


def find_temperature(model: GPT, prepared: Prepared) -> tuple[float, float]:
    """The temperature at which held-out text is the likeliest (Guo et al. 2017, section 4.2).

    Returns the temperature, a power of 1.05 from 1 on, and the nats of `_SAMPLE` held-out tokens with the
    logits divided by it, over those without. The model is left as it is.
    """
    scaled = deepcopy(model).eval()
    nats = [_nats(scaled, prepared)]
    while True:
        divide_logits(scaled, _STEP)
        nats.append(_nats(scaled, prepared))
        if not nats[-1] < nats[-2]:
            return _STEP ** (len(nats) - 2), nats[-2] / nats[0]


@torch.no_grad()
def divide_logits(model: GPT, temperature: float) -> None:
    """Divide the logits of a model by the temperature: its last norm's weights take it up."""
    for parameter in model.final_norm.parameters():
        parameter.div_(temperature)


def _nats(model: GPT, prepared: Prepared) -> float:
    return sum(float(nats.sum()) for nats, _ in score_windows(model, prepared, "val", _SAMPLE))
