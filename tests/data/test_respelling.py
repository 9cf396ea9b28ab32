"""BPE-dropout of windows: what stays, what differs, and how often."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from corpora import joined

from gpt.data.module import TokenData
from gpt.data.respelling import Respelling
from gpt.errors import InputError
from gpt.text.vocabulary import VocabularyToLearn, learn

TEXT = "the other weather gathers there, and they bathe together in the heather. " * 60
TOKENIZER = learn([TEXT], VocabularyToLearn(300))
ROWS = np.array(TOKENIZER.encode(TEXT)[:660], np.uint16).reshape(20, 33)


def respelling(share: float) -> Respelling:
    return Respelling(share, TOKENIZER, seed=3)


def by_the_paper(text: bytes, share: float, draw: random.Random) -> tuple[bytes, ...]:
    """Provilkov et al. 2020, algorithm 1: in each step, each merge is left out with a probability."""
    ranks = {token: rank for rank, token in enumerate(TOKENIZER.tokens)}
    parts = [text[i : i + 1] for i in range(len(text))]
    while True:
        formed = [(ranks.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
        made = [(rank, i) for rank, i in formed if rank is not None and draw.random() >= share]
        if not made:
            return tuple(parts)
        _, i = min(made)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_words_are_spelled_as_often_in_each_way_as_by_the_paper():
    """A word of several tokens too, in ways that cross them."""
    ids = TOKENIZER.encode(" bathere")
    assert [TOKENIZER.tokens[token] for token in ids] == [b" ", b"b", b"ather", b"e"]
    rows = np.array([ids + [TOKENIZER.eot] * 5] * 20000, np.uint16)  # an end of text stays one
    ways = Counter(
        tuple(TOKENIZER.tokens[token] for token in row if token != TOKENIZER.eot)
        for row in respelling(0.5)(rows, 0).tolist()
    )
    draw = random.Random(1)
    expected = Counter(by_the_paper(b" bathere", 0.5, draw) for _ in range(20000))
    assert expected[b" ", b"b", b"athe", b"r", b"e"] > 200
    for way, count in expected.items():
        if len(way) > len(ids):
            assert ways[way] == pytest.approx(count, abs=4 * (2 * count) ** 0.5)


def test_the_text_stays_and_ends_earlier():
    """With hardly any dropout the tokens stay, with all of it only bytes are left."""
    assert (respelling(1e-9)(ROWS, 0) == ROWS).all()
    bytes_only = respelling(1.0)(ROWS, 0)
    assert {len(TOKENIZER.tokens[token]) for token in bytes_only.ravel().tolist()} == {1}
    for row, before in zip(respelling(0.2)(ROWS, 0), ROWS, strict=True):
        assert (row != before).any()
        assert TOKENIZER.decode(before).startswith(TOKENIZER.decode(row))


@pytest.fixture
def data_of(tmp_path):
    """Makes a data module of the text."""
    (tmp_path / "text.txt").write_text(TEXT * 4, "utf-8")
    options = {"vocab_size": 300, "context_length": 16, "vocabulary": "learn", "val_fraction": 0.2}
    return lambda share: TokenData(str(tmp_path / "text.txt"), **options, bpe_dropout=share)


def test_a_run_trains_on_respelled_windows_and_validates_on_the_text(data_of):
    plain, respelled = data_of(0.0), data_of(0.2)
    x_plain, _ = next(iter(plain.train_dataloader()))
    x, y = next(iter(respelled.train_dataloader()))
    assert (x != x_plain).any()
    assert (x[:, 1:] == y[:, :-1]).all()
    decode = respelled.tokenizer.decode
    for before, after in zip(x_plain, x, strict=True):
        assert decode(before).startswith(decode(after)[:-8])
    for batches in zip(plain.val_dataloader(), respelled.val_dataloader(), strict=True):
        assert all(map(torch.equal, *batches))


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_is_at_most_one(share):
    with pytest.raises(InputError, match=f"bpe_dropout must be in .0, 1., got {share}"):
        TokenData(bpe_dropout=share)


def test_processes_share_the_windows_of_one(data_of):
    """How a window is spelled depends only on its number in the run."""
    data = data_of(0.2)
    data.batch_size = 4
    alone = data.train_dataloader()
    data.batch_size = 2
    together = [joined(data, rank, processes=2).train_dataloader() for rank in (0, 1)]
    for (_, y), *parts in zip(alone, *together, strict=True):
        assert torch.equal(y, torch.cat([y for _, y in parts]))
