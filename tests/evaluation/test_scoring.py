"""Figures of a text from the nats and bytes of its windows."""

import math

import numpy as np
import pytest
import torch

from gpt.evaluation.scoring import quarters, repeated


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


def test_what_repeats_is_what_followed_the_same_token_before_in_its_window():
    """Beside loops over all pairs of places; padding has no nats."""
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(4, (3, 9), generator=draw)
    tokens, targets = text[:, :-1], text[:, 1:]
    nats = torch.rand(3, 8, generator=draw, dtype=torch.float64)
    nats[2, 5:] = 0.0
    found = 0.0
    for row, window in enumerate(text.tolist()):
        for place in range(1, 8):
            pairs = [window[before : before + 2] for before in range(place)]
            found += float(nats[row, place]) * (window[place : place + 2] in pairs)
    assert 0 < found < nats.sum()
    assert repeated(nats, tokens, targets) == pytest.approx(found / float(nats.sum()))
