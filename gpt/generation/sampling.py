"""Draw the next token from logits: pure functions of logits, settings and one random number for each row.

Shapes: N rows, V vocab_size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy
import torch
from torch import Tensor

from gpt.errors import InputError

_RANGES = {
    "repetition_penalty": (0.01, 100),
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (1, 2**31),
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings by which the next token is drawn. They apply in the order of the fields.

    Raises InputError for a value out of its range.
    """

    repetition_penalty: float = 1.0  # lowers the logits of tokens that came before; 1 changes nothing
    temperature: float = 1.0  # divides the logits; 0 takes the most likely token, 1 changes nothing
    top_k: int | None = None  # draw from the k most likely tokens, and any as likely as the last of these
    top_p: float | None = None  # draw from the smallest set of most likely tokens whose probability reaches p
    min_p: float | None = None  # draw from tokens at least p times as likely as the most likely one

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InputError(f"{name} must be {low} to {high}, got {value}")


def uniform(seed: int, sample: int) -> Iterator[float]:
    """Yield random numbers in [0, 1). Number k is a hash of the seed, the sample's number and k.

    The page in a browser computes the same numbers (gpt/share/sampling.js). The hash function is lowbias32
    (Wellons 2018).
    """
    for place in count():
        bits = 0
        for part in (seed, seed >> 32, sample, place):
            bits = ((bits ^ part) + 0x9E3779B9) & 0xFFFFFFFF
            bits = (bits ^ bits >> 16) * 0x7FEB352D & 0xFFFFFFFF
            bits = (bits ^ bits >> 15) * 0x846CA68B & 0xFFFFFFFF
            bits ^= bits >> 16
        yield (bits >> 8) / 2**24


def sample_tokens(
    logits: Tensor,
    sampling: Sampling,
    seen: Tensor | None,
    numbers: Tensor,
) -> Tensor:
    """Draw the next token of each row: logits (N, V) -> ids (N,), -1 where the logits are not finite.

    Row k depends only on its own logits, on `seen[k]`, and on `numbers[k]`. `seen` is (N, V), whether an id
    came before; None stands for no ids. `numbers` is (N,), uniform in [0, 1).
    """
    if sampling.repetition_penalty != 1 and seen is not None:
        logits = penalize(logits, sampling.repetition_penalty, seen)
    if sampling.temperature > 0 and torch.are_deterministic_algorithms_enabled():
        logits = logits.cpu()  # a cumulative sum on a GPU is not deterministic, so PyTorch would raise
    finite = logits.amax(dim=-1).isfinite()  # (N,)
    if sampling.temperature == 0:
        ids = logits.argmax(dim=-1)
    else:
        cumulative = probabilities(logits, sampling).cumsum(dim=-1)  # (N, V)
        total = cumulative[:, -1:]
        number = numbers.to(logits.device, cumulative.dtype)[:, None]  # (N, 1)
        number = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))
        ids = torch.searchsorted(cumulative, number, right=True)[:, 0]
    return ids.masked_fill(~finite, -1)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution that is sampled if the temperature is above 0: logits (N, V) -> (N, V)."""
    # The largest logit becomes 0, so that even a very low temperature gives no infinity.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(sampling.temperature, 1e-30)
    return filter_logits(logits, sampling).softmax(-1)


def penalize(logits: Tensor, penalty: float, seen: Tensor) -> Tensor:
    """Lower the logits of ids that came before, `seen` (N, V): divide positive ones, multiply negative ones.

    (N, V) -> (N, V). Keskar et al. 2019, section 4.1.
    """
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, lowered, logits)


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Set to -inf the logits that top-k, nucleus and min-p sampling exclude, in this order: (N, V) -> (N, V).

    `top_k` is from Fan et al. 2018, section 5.4. `top_p` is from Holtzman et al. 2020, section 3.1, and
    applies to the tokens that top-k keeps. `min_p` is from Nguyen et al. 2024, section 3. Tokens as likely as
    the last one kept are kept too. The most likely token is always kept.
    """
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]  # (N, 1)
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        logits = logits.masked_fill(logits < _nucleus_edge(logits, sampling.top_p), -torch.inf)
    if sampling.min_p:
        smallest = logits.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    return logits


def _nucleus_edge(logits: Tensor, top_p: float) -> Tensor:
    """Return the smallest logit in the smallest set that reaches probability `top_p`: (N, V) -> (N, 1)."""
    # On a CPU, NumPy sorts a vocabulary ten times as fast as PyTorch.
    ordered = torch.from_numpy(numpy.sort(logits.numpy())) if logits.is_cpu else logits.sort().values
    ordered = ordered.flip(-1)
    mass = ordered.softmax(-1)
    likelier = mass.cumsum(-1) - mass
    kept = (likelier < top_p).sum(-1, keepdim=True).clamp(min=1)  # (N, 1)
    return ordered.gather(-1, kept - 1)
