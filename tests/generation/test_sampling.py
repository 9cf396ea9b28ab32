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
    Sampling(temperature=0.5),
    Sampling(top_k=3),
    Sampling(top_k=100),
    Sampling(top_p=0.01),
    Sampling(top_p=0.6),
    Sampling(min_p=0.2),
    Sampling(temperature=1.7, top_k=5, top_p=0.8, min_p=0.3),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_distribution_is_the_definitions(sampling):
    expected = reference(LOGITS[0].tolist(), sampling)
    torch.testing.assert_close(probabilities(LOGITS, sampling)[0], torch.tensor(expected))


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_draws_follow_the_distribution_by_chi_square(sampling):
    """At this fixed seed; 24.3 is the 99.9 % point of chi-square with 7 degrees of freedom."""
    draws, numbers = 20_000, random.Random(5)
    ids = sample_tokens(
        LOGITS.expand(draws, -1),
        sampling,
        seen=[[]] * draws,
        numbers=torch.tensor([numbers.random() for _ in range(draws)]),
    )
    counts = torch.bincount(ids, minlength=8).tolist()
    expected = [p * draws for p in reference(LOGITS[0].tolist(), sampling)]
    assert all(count == 0 for count, e in zip(counts, expected, strict=True) if e == 0)
    assert sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e > 0) < 24.3


def test_a_nucleus_wider_than_the_first_look():
    logits = torch.randn(2, 5000)
    logits[1] *= 20  # a narrow one beside it
    kept = filter_logits(logits, Sampling(top_p=0.9)).isfinite()
    for row, of_row in zip(logits, kept, strict=True):
        ordered = row.softmax(-1).sort(descending=True).values
        count = int((ordered.cumsum(-1) < 0.9).sum()) + 1
        assert abs(int(of_row.sum()) - count) <= 1  # the edge is where rounding decides
    assert kept[0].sum() > 1024 > kept[1].sum()


def test_equally_likely_tokens_are_kept_together():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert filter_logits(logits, Sampling(top_k=1)).isfinite().tolist() == [[False, True, True, False]]


def test_a_temperature_of_0_takes_the_likeliest():
    assert sample_tokens(
        LOGITS, Sampling(temperature=0), seen=[[]], numbers=torch.tensor([0.99])
    ).tolist() == [3]


def test_a_tiny_temperature_is_nearly_0():
    assert sample_tokens(
        LOGITS, Sampling(temperature=1e-300), seen=[[]], numbers=torch.tensor([0.5])
    ).tolist() == [3]


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_interval_draw_possible_tokens(number):
    logits = torch.full((1, 50257), -torch.inf)
    logits[0, 100:200] = 0.0
    drawn = sample_tokens(logits, Sampling(), seen=[[]], numbers=torch.tensor([number])).item()
    assert drawn == (100 if number == 0 else 199)


def test_a_row_is_drawn_the_same_in_any_company():
    logits = torch.randn(7, 300)
    numbers = torch.rand(7)
    sampling = Sampling(temperature=1.3, top_p=0.9, repetition_penalty=1.2)
    seen = [[i, i + 1] for i in range(7)]
    together = sample_tokens(logits, sampling, seen, numbers)
    for i in range(7):
        assert sample_tokens(logits[i : i + 1], sampling, seen[i : i + 1], numbers[i : i + 1]) == together[i]


def test_ids_without_a_logit_have_no_penalty():
    """A prompt may hold ids of the model beyond those of the tokenizer, which are not drawn."""
    given = penalize(LOGITS, Sampling(repetition_penalty=2.0), [[3, 300]], [2])
    assert given[0, 3] == 1.5


def test_the_penalty_lowers_tokens_seen_whatever_their_sign():
    given = penalize(LOGITS, Sampling(repetition_penalty=2.0), [[3, 3, 6]], [3])
    assert given[0, 3] == 1.5 and given[0, 6] == -6.0
    others = [0, 1, 2, 4, 5, 7]
    assert torch.equal(given[0, others], LOGITS[0, others])
    assert LOGITS[0, 3] == 3.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_give_no_token(temperature):
    """The engine ends their text with an error: test_graphs.py."""
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = torch.nan
    sampling, numbers = Sampling(temperature=temperature), torch.full((3,), 0.5)
    whole, broken, last = sample_tokens(logits, sampling, seen=[[]] * 3, numbers=numbers).tolist()
    assert broken == -1 and whole == last >= 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", 100.5),
        ("repetition_penalty", 100.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("top_p", 1.5),
        ("min_p", 1.1),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(InputError, match=f"{name}.*{value}"):
        Sampling(**{name: value})


class OnGPU(torch.Tensor):
    """A tensor whose cumulative sum raises, as on a GPU, until `cpu()` has made it a plain one."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cumsum:
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        result = super().__torch_function__(function, types, args, kwargs)
        return result.as_subclass(torch.Tensor) if function is torch.Tensor.cpu else result


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.8), Sampling(top_k=3, temperature=0.7)])
def test_where_algorithms_must_be_deterministic_a_gpu_leaves_drawing_to_the_cpu(sampling):
    logits = torch.randn(4, 50)
    options = {"sampling": sampling, "seen": [[]] * 4, "numbers": torch.tensor([0.1, 0.4, 0.6, 0.9])}
    expected = sample_tokens(logits, **options)
    with pytest.raises(RuntimeError, match="cumsum"):
        sample_tokens(logits.as_subclass(OnGPU), **options)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(sample_tokens(logits.as_subclass(OnGPU), **options), expected)
    finally:
        torch.use_deterministic_algorithms(False)
