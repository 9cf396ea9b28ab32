"""From logits to the next token: pure functions of logits, settings and one random number for each row.

Shapes: N rows, V vocab_size, C the likeliest candidates considered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.errors import InputError, check_least

_FIRST_LOOK = 1024  # nucleus sampling sorts so many first; the whole vocabulary takes ten times as long
_RANGES = {
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "temperature": (0, 100),
    "top_p": (1e-6, 1),
    "min_p": (0, 1),
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn, in the order of the fields; InputError for a value out of its range."""

    repetition_penalty: float = 1.0  # lowers the logits of tokens that came before; 1 changes nothing
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that were generated before
    frequency_penalty: float = 0.0  # subtracted from a token's logit as many times as it was generated before
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of a token id and what is added to its logit
    temperature: float = 1.0  # divides the logits; 0 takes the likeliest token, 1 is the model's distribution
    top_k: int | None = None  # draw from the k likeliest tokens, and from those as likely as the last of them
    top_p: float | None = None  # draw from the smallest set of likeliest tokens whose probability reaches p
    min_p: float | None = None  # draw from tokens at least p times as likely as the likeliest

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            if (value := getattr(self, name)) is not None and not low <= value <= high:
                raise InputError(f"{name} must be {low} to {high}, got {value}")
        check_least(1, top_k=self.top_k)
        for id_, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise InputError(f"logit_bias must be -100 to 100, got {bias} for token {id_}")

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the tokens before."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)


def sample_tokens(
    logits: Tensor,
    sampling: Sampling,
    seen: Sequence[Sequence[int]],
    numbers: Tensor,
    prompt_lengths: Sequence[int] | None = None,
) -> Tensor:
    """The next token of each row: logits (N, V) -> ids (N,), -1 where the logits are not finite.

    Row k depends only on its own logits, on `seen[k]` (the tokens before it, of which the first
    `prompt_lengths[k]` were not generated) and on `numbers[k]`, of (N,), uniform in [0, 1).
    """
    logits = penalize(logits, sampling, seen, prompt_lengths or [0] * len(seen))
    if sampling.temperature == 0:
        # NumPy's is ten times as fast as PyTorch's on a CPU, where that took a tenth of a step of 16 rows.
        ids = torch.from_numpy(logits.detach().numpy().argmax(-1)) if logits.is_cpu else logits.argmax(dim=-1)
        finite = logits.gather(-1, ids[:, None]).isfinite()  # (N, 1); argmax returns a NaN
    else:
        if torch.are_deterministic_algorithms_enabled():
            logits = logits.cpu()  # cumulative sums on a GPU are not deterministic, and would raise
        cumulative = probabilities(logits, sampling).cumsum(dim=-1)  # (N, V)
        total = cumulative[:, -1:]
        finite = total.isfinite()
        number = numbers.to(logits.device, cumulative.dtype)[:, None]  # (N, 1)
        number = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))
        ids = torch.searchsorted(cumulative, number, right=True)[:, 0]
    return ids.masked_fill(~finite[:, 0], -1)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is sampled at a temperature above 0: logits (N, V) -> probabilities (N, V)."""
    # The likeliest token's logit becomes 0, so that no temperature, however low, divides into infinity.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(sampling.temperature, 1e-30)
    return filter_logits(logits, sampling).softmax(dim=-1)


def penalize(
    logits: Tensor, sampling: Sampling, seen: Sequence[Sequence[int]], prompt_lengths: Sequence[int]
) -> Tensor:
    """Apply the penalties and `logit_bias`: (N, V) -> (N, V).

    The repetition penalty divides positive logits and multiplies negative ones (Keskar et al. 2019, 4.1).
    """
    if not sampling.looks_back and not sampling.logit_bias:
        return logits
    logits = logits.clone()
    for row, ids, prompt_length in zip(logits, seen, prompt_lengths, strict=True):
        before = torch.tensor(ids, dtype=torch.int64, device=row.device)
        counts = before[prompt_length:].bincount(minlength=len(row))  # (V,)
        before = before[before < len(row)]
        scale = sampling.repetition_penalty
        row[before] = torch.where(row[before] > 0, row[before] / scale, row[before] * scale)
        row -= sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts
        for id_, bias in sampling.logit_bias:
            row[id_] += bias
    return logits


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Set to -inf the logits that top-k, nucleus and min-p sampling exclude, in this order: (N, V) -> (N, V).

    `top_k` is Fan et al. 2018, section 5.4; `top_p` Holtzman et al. 2020, section 3.1, applied to the
    tokens that top-k keeps; `min_p` Nguyen et al. 2024, section 3. Tokens as likely as the last one kept are
    kept too, and the likeliest token always is.
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
    """The smallest logit in the smallest set that reaches probability `top_p`: (N, V) -> (N, 1)."""
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    first = logits.shape[-1] if logits.is_cuda else min(_FIRST_LOOK, logits.shape[-1])  # a GPU need not ask
    for candidates in (first, logits.shape[-1]):
        likeliest = logits.topk(candidates, dim=-1).values  # (N, C), descending
        mass = (likeliest - normaliser).exp()
        before = mass.cumsum(dim=-1) - mass  # the mass of likelier tokens
        kept = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)  # (N, 1)
        if candidates == logits.shape[-1] or (kept < candidates).all():
            break
    return likeliest.gather(-1, kept - 1)
