"""Cross-entropy over a sample of the vocabulary: a small model computes it in a fraction of the time.

It is for a CPU. The sample's size decides shapes, so a GPU would wait for it in each batch, while scoring the
whole vocabulary costs little there: `LanguageModel.cross_entropy` does so.

Shapes: N positions, D features, V vocabulary, S sampled tokens of the vocabulary.
"""

import math

import torch
from torch import Tensor

from gpt.training.loss import Kernel, linear_cross_entropy

LATE = 0.2
"""Fraction of a run's updates, the last ones, with larger samples: they correct the bias of smaller ones."""
LATE_ONE_IN = 2
"""In these late updates, one in `LATE_ONE_IN` of the tokens that are no targets is sampled."""


def early_steps(total: int) -> int:
    """Return the number of a run's updates before the late ones."""
    return int((1 - LATE) * total)


def sampled_cross_entropy(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    one_in: int,
    chunk: int | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Estimate the mean cross-entropy by a sampled softmax (Jean et al. 2015, section 3).

    The sample has all targets, and one in `one_in` of the other tokens, at random. Each of these counts
    `one_in` times in the softmax's denominator, so the denominator is right on average. The other arguments
    are those of `linear_cross_entropy`.
    """
    known = targets.clamp(min=0)  # (N,)
    is_target = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)  # (V,)
    is_target.index_fill_(0, known, True)
    is_sampled = is_target | (one_in * torch.rand(len(weight), device=weight.device) < 1)  # (V,)
    ids = is_sampled.nonzero().flatten()  # (S,); a CPU has no device to wait for here
    table = weight.index_select(0, ids)  # (S, D); its backward is faster than that of weight[ids]
    correction = math.log(one_in) * ~is_target[ids]  # (S,): one that is no target counts `one_in` times
    places = is_sampled.cumsum(0) - 1  # (V,), each sampled token's index in `ids`
    sampled_targets = torch.where(targets < 0, targets, places[known])  # (N,)
    return linear_cross_entropy(features, table, sampled_targets, chunk, kernel, bias=correction)


def sampled_share(vocab_size: int, tokens: int, one_in: int) -> float:
    """Estimate the share of the vocabulary that is sampled for a batch of `tokens`, targets included.

    The error is at most 0.1 for prose and code, with vocabularies of 1,024 to 16,384 tokens.
    """
    seen = 5.5 * tokens**0.8 / vocab_size**1.12  # number of target tokens per other token
    return float(1 - (1 - 1 / one_in) / (1 + seen))
