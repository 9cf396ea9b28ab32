"""Stored tokens: their ids, and which of them are scored."""

import numpy as np

from gpt.data.stored import as_unscored, is_scored, may_be_unscored, token_dtype, token_ids


def test_ids_are_the_same_whether_they_are_scored_or_not():
    ids = np.array([[0, 1, 50_256]])
    dtype = token_dtype(examples=True)
    stored = np.concatenate([ids, as_unscored(ids)]).astype(dtype)
    assert token_ids(stored).tolist() == [[0, 1, 50_256]] * 2
    assert is_scored(stored).tolist() == [[True] * 3, [False] * 3]
    assert may_be_unscored(stored) and dtype.itemsize == 4


def test_tokens_of_plain_text_are_all_scored():
    stored = np.array([0, 1, 65_535]).astype(token_dtype(examples=False))
    assert token_ids(stored).tolist() == [0, 1, 65_535]
    assert is_scored(stored).all() and not may_be_unscored(stored)
    assert stored.dtype.itemsize == 2
