"""Intervals beside numpy's own arithmetic, tables of Student's t, and many simulated comparisons."""

import math

import numpy as np
import pytest

from gpt.compare.interval import Interval, mean_interval, paired_interval, probability_within, student_t

# Two-sided 95 %, from the tables of textbooks.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 15: 2.131, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("degrees", "t"), TABLE.items())
def test_students_t_is_that_of_the_tables(degrees, t):
    assert student_t(degrees) == pytest.approx(t, abs=5e-4)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 12, 29])
def test_the_probability_is_the_integral_of_the_density(degrees):
    t = np.linspace(0, 2.5, 200_001)
    scale = math.gamma((degrees + 1) / 2) / math.sqrt(degrees * math.pi) / math.gamma(degrees / 2)
    density = scale * (1 + t**2 / degrees) ** (-(degrees + 1) / 2)
    area = 2 * float(np.sum((density[1:] + density[:-1]) / 2) * (t[1] - t[0]))
    assert probability_within(2.5, degrees) == pytest.approx(area, abs=1e-8)


def test_one_text_is_the_paired_t_test():
    values = np.array([0.011, 0.018, 0.009, 0.016, 0.020])
    found = mean_interval(values.tolist())
    assert found.mean == pytest.approx(values.mean())
    assert found.half == pytest.approx(2.776445 * values.std(ddof=1) / np.sqrt(5), rel=1e-6)
    assert found.is_certain


def test_what_texts_differ_by_is_no_noise():
    """The scatter of seeds is pooled: three texts of two seeds have three degrees of freedom."""
    table = np.array([[0.10, 0.12], [-0.30, -0.28], [0.50, 0.53]])
    found = paired_interval(table.tolist())
    within = ((table - table.mean(axis=1, keepdims=True)) ** 2).sum() / 3
    assert found.mean == pytest.approx(table.mean())
    assert found.half == pytest.approx(3.182446 * np.sqrt(within / 6), rel=1e-6)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    random = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        found = paired_interval(random.normal(0.5, 1.0, (2, 3)).tolist())
        held += found.low < 0.5 < found.high
    assert 930 <= held <= 970


def test_a_difference_that_is_there_is_found_and_one_that_is_not_is_not_claimed():
    random = np.random.default_rng(1)
    noise = random.normal(0, 0.003, (400, 3))
    found = sum(mean_interval(row).is_certain for row in (noise + 0.03).tolist())
    claimed = sum(mean_interval(row).is_certain for row in noise.tolist())
    assert found >= 390
    assert claimed <= 32  # a twentieth of 400 is 20


def test_zero_at_the_end_of_an_interval_is_no_difference():
    assert not Interval(0.0, 0.0).is_certain
    assert not Interval(1.0, 1.0).is_certain
    assert Interval(-1.0, 0.5).is_certain


def test_one_seed_has_no_interval():
    with pytest.raises(ValueError, match="one seed"):
        paired_interval([[0.1], [0.2]])
