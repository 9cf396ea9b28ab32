"""Intervals beside numpy's own arithmetic and tables of Student's t."""

import numpy as np
import pytest

from gpt.compare.interval import Interval, paired_interval, student_t

# Two-sided 95 %, from the tables of textbooks.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 15: 2.131, 30: 2.042, 120: 1.980}


def test_students_t_is_that_of_the_tables():
    assert {degrees: student_t(degrees) for degrees in TABLE} == pytest.approx(TABLE, abs=5e-4)


PAIRED = {
    "one text, the paired t-test": ([[0.011, 0.018, 0.009, 0.016, 0.020]], 2.776445),
    "three texts: the scatter of their seeds is pooled": (
        [[0.10, 0.12], [-0.30, -0.28], [0.50, 0.53]],
        3.182446,
    ),
}


@pytest.mark.parametrize(("differences", "t"), PAIRED.values(), ids=PAIRED)
def test_what_texts_differ_by_is_no_noise(differences, t):
    table = np.array(differences)
    interval = paired_interval(differences)
    within = table.var(axis=1, ddof=1).mean()
    assert interval.mean == pytest.approx(table.mean())
    assert interval.half == pytest.approx(t * np.sqrt(within / table.size), rel=1e-6)


def test_zero_at_the_end_of_an_interval_is_no_difference():
    assert not Interval(0.0, 0.0).is_certain
    assert not Interval(1.0, 1.0).is_certain
    assert Interval(-1.0, 0.5).is_certain


def test_one_seed_has_no_interval():
    with pytest.raises(ValueError, match="one seed"):
        paired_interval([[0.1], [0.2]])
