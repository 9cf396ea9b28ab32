import math
import random

import pytest
import torch

from gpt.errors import InputError
from gpt.generation.sampling import Sampling, filter_logits, penalize, probabilities, sample_tokens

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 3.0, 0.0, 1.5, -3.0, 2.5]])


def reference(logits: list[float], sampling: Sampling) -> list[float]:
    """The distribution from its definition, by sorting a Python list."""
    weights = [math.exp(logit / sampling.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])[: sampling.top_k]
    if sampling.top_p is not None:
        total, mass, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            mass += weights[i] / total
            if mass >= sampling.top_p:
                break
        order = kept
    if sampling.min_p is not None:
        order = [i for i in order if weights[i] >= sampling.min_p * weights[order[0]]]
    total = sum(weights[i] for i in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(logits))]


SETTINGS = [
    Sampling(),
    Sampling(top_k=3),
    Sampling(top_p=0.01),
    Sampling(top_p=0.6),
    Sampling(min_p=0.2),
    Sampling(temperature=1.7, top_k=5, top_p=0.8, min_p=0.3),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_draws_follow_the_distribution_of_the_definition(sampling):
    """By chi-square at this fixed seed; 24.3 is the 99.9 % point with 7 degrees of freedom."""
    distribution = torch.tensor(reference(LOGITS[0].tolist(), sampling))
    torch.testing.assert_close(probabilities(LOGITS, sampling)[0], distribution)
    numbers, draws = random.Random(5), 20_000
    uniform = torch.tensor([numbers.random() for _ in range(draws)])
    ids = sample_tokens(LOGITS.expand(draws, -1), sampling, None, uniform)
    counts, expected = ids.bincount(minlength=8), draws * distribution
    possible = expected > 0
    assert not counts[~possible].any()
    assert ((counts - expected) ** 2 / expected)[possible].sum() < 24.3


@pytest.mark.parametrize("sampling", [Sampling(top_k=1), Sampling(top_p=0.1), Sampling(top_p=0)], ids=str)
def test_equally_likely_tokens_are_kept_together(sampling):
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert filter_logits(logits, sampling).isfinite().tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("temperature", [0, 1e-300])
def test_a_temperature_of_0_takes_the_likeliest(temperature):
    ids = sample_tokens(1e9 * LOGITS, Sampling(temperature=temperature), None, torch.tensor([0.5]))
    assert ids.tolist() == [3]


@pytest.mark.parametrize(("number", "drawn"), [(0.0, 100), (1 - 2**-53, 199)])
def test_the_ends_of_the_interval_draw_possible_tokens(number, drawn):
    logits = torch.full((1, 50257), -torch.inf)
    logits[0, 100:200] = 0.0
    assert sample_tokens(logits, Sampling(), None, torch.tensor([number])).tolist() == [drawn]


def test_a_row_is_drawn_the_same_in_any_company():
    logits, numbers = torch.randn(7, 300), torch.rand(7)
    sampling = Sampling(temperature=1.3, top_p=0.9, repetition_penalty=1.2)
    seen = torch.rand(7, 300) < 0.1
    together = sample_tokens(logits, sampling, seen, numbers)
    for i in range(7):
        assert sample_tokens(logits[i : i + 1], sampling, seen[i : i + 1], numbers[i : i + 1]) == together[i]


def test_the_penalty_lowers_tokens_seen_whatever_their_sign():
    seen = torch.zeros(1, 8, dtype=torch.bool)
    seen[:, [3, 6]] = True
    given = penalize(LOGITS, 2.0, seen)
    assert given.tolist() == [[2.0, -1.0, 0.5, 1.5, 0.0, 1.5, -6.0, 2.5]]
    assert LOGITS[0, 3] == 3.0


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_logits_give_no_token(broken):
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = broken
    numbers = torch.full((3,), 0.5)
    first, second, third = sample_tokens(logits, Sampling(), None, numbers).tolist()
    assert second == -1 and first == third >= 0


OUT_OF_RANGE = [
    *(("temperature", -1), ("temperature", math.nan), ("repetition_penalty", 0.0)),
    *(("top_k", 0), ("top_p", -0.1), ("top_p", 1.5), ("min_p", 1.1)),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(InputError, match=f"{name}.*{value}"):
        Sampling(**{name: value})


class OnGPU(torch.Tensor):
    """A tensor that behaves as on a GPU until `cpu()` has made it a plain one.

    Its cumulative sum is not deterministic, and it does not mask a tensor of the CPU.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cumsum:
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        if function is torch.Tensor.masked_fill and type(args[0]) is not type(args[1]):
            raise RuntimeError("expected self and mask to be on the same device")
        result = super().__torch_function__(function, types, args, kwargs)
        return result.as_subclass(torch.Tensor) if function is torch.Tensor.cpu else result


def test_where_algorithms_must_be_deterministic_a_gpu_leaves_drawing_to_the_cpu():
    logits, sampling = torch.randn(4, 50), Sampling(top_k=3, temperature=0.7)
    more = sampling, None, torch.tensor([0.1, 0.4, 0.6, 0.9])
    with pytest.raises(RuntimeError, match="cumsum"):
        sample_tokens(logits.as_subclass(OnGPU), *more)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(sample_tokens(logits.as_subclass(OnGPU), *more), sample_tokens(logits, *more))
    finally:
        torch.use_deterministic_algorithms(False)
