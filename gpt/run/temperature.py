"""Temperature scaling, for a model that is overconfident after many epochs on its text.

Shapes: N tokens, D emb_dim.
"""

import torch

from gpt.data.prepared import Prepared
from gpt.evaluation.scoring import batches_of, scored_features
from gpt.model import GPT
from gpt.training.loss import head_cross_entropy

_STEP = 1.05
_MOST = 64.0  # a model that is worse than guessing would want an infinite temperature
_SAMPLE = 4096  # tokens, enough to find the temperature within 1 %


@torch.no_grad()
def find_temperature(model: GPT, prepared: Prepared, isolate: bool = False) -> tuple[float, float]:
    """Find the temperature at which held-out text has the lowest loss (Guo et al. 2017, section 4.2).

    Returns the temperature (1, 1.05, 1.05 ** 2, ...) and a ratio: the loss on `_SAMPLE` held-out tokens with
    the logits divided by it, over the loss without. `isolate` keeps attention within documents, as in the
    run's validation. The model has to be in evaluation mode.
    """
    batches = batches_of(prepared, "val", model.config.context_length, _SAMPLE, isolate=isolate)
    scored = [scored_features(model, *batch) for batch in batches]
    features, targets = (torch.cat(tensors) for tensors in zip(*scored, strict=True))  # (N, D) and (N,)

    def loss(power: int) -> float:
        """Return the loss in nats with the temperature `_STEP ** power`.

        A head computes logits that are linear in the features, so these are divided.
        """
        return float(head_cross_entropy(model.head, features / _STEP**power, targets))

    losses = [loss(0), loss(1)]
    while losses[-1] < losses[-2] and _STEP ** len(losses) <= _MOST:
        losses.append(loss(len(losses)))
    best = min(range(len(losses)), key=lambda power: losses[power])
    ratio = losses[best] / losses[0] if best else 1.0
    return _STEP**best, ratio


@torch.no_grad()
def divide_logits(model: GPT, temperature: float) -> None:
    """Divide a model's logits by the temperature, by scaling the weights of its last norm."""
    for parameter in model.final_norm.parameters():
        parameter.div_(temperature)
