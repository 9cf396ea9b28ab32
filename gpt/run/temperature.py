"""Temperature scaling, for a model that is too sure of itself as it has read its text too often."""

import torch
from torch import nn

from gpt.data.shards import Prepared
from gpt.evaluation.scoring import score_windows
from gpt.model import GPT

_STEP = 1.05
_SAMPLE = 4096  # tokens: they tell the temperature within a hundredth


@torch.no_grad()
def scale_temperature(model: GPT, prepared: Prepared) -> tuple[float, float]:
    """Divide the logits by the temperature at which held-out text is the likeliest (Guo et al. 2017, section
    4.2): the last norm's weights take it up, so the model stays an ordinary GPT.

    Returns the temperature, a power of 1.05, and the nats of `_SAMPLE` held-out tokens over those before.
    The model is in evaluation mode.
    """
    norm = model.final_norm
    nats = [_nats(model, prepared)]
    while True:
        before = nn.utils.parameters_to_vector(norm.parameters())
        nn.utils.vector_to_parameters(before / _STEP, norm.parameters())
        nats.append(_nats(model, prepared))
        if not nats[-1] < nats[-2]:
            nn.utils.vector_to_parameters(before, norm.parameters())
            return _STEP ** (len(nats) - 2), nats[-2] / nats[0]


def _nats(model: GPT, prepared: Prepared) -> float:
    return sum(float(nats.sum()) for nats, _ in score_windows(model, prepared, "val", _SAMPLE))
