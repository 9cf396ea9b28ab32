"""Figures of a text from the nats and bytes of its windows."""

import math

import numpy as np
import pytest

from gpt.evaluation.scoring import quarters


def byte_by_byte(nats, sizes):
    """Each window's nats spread over its bytes, which are sorted and cut into four."""
    order = sorted(range(len(sizes)), key=lambda i: nats[:, i].sum() / sizes[i])
    each = [nats[:, i] / sizes[i] for i in order for _ in range(sizes[i])]
    return np.array(each).reshape(4, -1, len(nats)).mean(axis=1).T / math.log(2)


def test_quarters_have_the_same_number_of_bytes():
    draw = np.random.default_rng(1)
    sizes = draw.integers(1, 9, 37)
    sizes[0] += -sizes.sum() % 4
    nats = draw.uniform(0.5, 4.0, (2, 37)) * sizes
    found = quarters(nats, sizes)
    assert found == pytest.approx(byte_by_byte(nats, sizes))
    assert found.mean(axis=1) == pytest.approx(nats.sum(axis=1) / sizes.sum() / math.log(2))


def test_one_window_is_all_quarters():
    assert quarters(np.array([[8.0], [4.0]]), np.array([2])) == pytest.approx(
        np.array([[4.0] * 4, [2.0] * 4]) / math.log(2)
    )
