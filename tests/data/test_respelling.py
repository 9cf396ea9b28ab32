"""BPE-dropout of windows: what stays, what differs, and how often."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from gpt.data.module import TokenData
from gpt.data.respelling import Respelling
from gpt.data.windows import Grid, TrainWindows
from gpt.errors import InputError
from gpt.text.vocabulary import Learned, learn

TEXT = "the other weather gathers there, and they bathe together in the heather. " * 60
TOKENIZER = learn([TEXT], Learned(300))
ROWS = np.array(TOKENIZER.encode(TEXT)[:660], np.uint16).reshape(20, 33)


def respelling(share: float) -> Respelling:
    return Respelling(share, TOKENIZER.tokens, seed=3)


def test_with_hardly_any_dropout_tokens_stay_and_with_all_of_it_only_bytes_are_left():
    assert (respelling(1e-9)(ROWS, 0) == ROWS).all()
    found = respelling(1.0)(ROWS, 0)
    assert {len(TOKENIZER.tokens[token]) for token in found.ravel().tolist()} == {1}


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
    rows = np.array([ids + [TOKENIZER.eot] * 5] * 20000, np.uint16)
    found = Counter(
        tuple(TOKENIZER.tokens[token] for token in row if token != TOKENIZER.eot)
        for row in respelling(0.5)(rows, 0).tolist()
    )
    draw = random.Random(1)
    expected = Counter(by_the_paper(b" bathere", 0.5, draw) for _ in range(20000))
    assert expected[b" ", b"b", b"athe", b"r", b"e"] > 200
    for way, count in expected.items():
        if len(way) > len(ids):
            assert found[way] == pytest.approx(count, abs=4 * (2 * count) ** 0.5)


def test_the_text_stays_and_ends_earlier():
    found = respelling(0.2)(ROWS, 0)
    assert found.shape == ROWS.shape and found.dtype == ROWS.dtype
    assert (found != ROWS).any(axis=1).mean() > 0.9
    for row, before in zip(found, ROWS, strict=True):
        assert TOKENIZER.decode(before).startswith(TOKENIZER.decode(row))


def test_the_end_of_text_stays():
    rows = np.full((1, 5), TOKENIZER.eot, np.uint16)
    assert (respelling(1.0)(rows, 0) == rows).all()


def test_a_window_is_spelled_by_its_number_in_the_run_alone():
    whole = respelling(0.1)(ROWS, 7)
    halves = [respelling(0.1)(ROWS[:9], 7), respelling(0.1)(ROWS[9:], 16)]
    assert (whole == np.concatenate(halves)).all()
    assert (whole != respelling(0.1)(ROWS, 8)).any()


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_a_token_of_one_merge_is_split_as_often_as_the_share_says(share):
    pairs = [token for token, each in enumerate(TOKENIZER.tokens) if len(each) == 2]
    rows = np.array([[token, TOKENIZER.eot] for token in pairs for _ in range(64)], np.uint16)
    assert (respelling(share)(rows, 0) != rows).any(axis=1).mean() == pytest.approx(share, rel=0.25)


def test_a_run_trains_on_respelled_windows_and_validates_on_the_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 4, encoding="utf-8")
    options = {"vocab_size": 300, "context_length": 16, "vocabulary": "learn", "val_fraction": 0.2}
    plain, other = (TokenData(str(path), **options, bpe_dropout=share) for share in (0.0, 0.2))
    for data in (plain, other):
        data.setup("fit")
    (x, _), (x_other, y_other) = (next(iter(data.train_dataloader())) for data in (plain, other))
    assert (x != x_other).any()
    assert (x_other[:, 1:] == y_other[:, :-1]).all()
    decode = other.tokenizer.decode
    for before, after in zip(x, x_other, strict=True):
        assert decode(before).startswith(decode(after)[:-8])
    for one, two in zip(plain.val_dataloader(), other.val_dataloader(), strict=True):
        assert all(map(torch.equal, one, two))


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_is_at_most_one(share):
    with pytest.raises(InputError, match=f"bpe_dropout must be in .0, 1., got {share}"):
        TokenData(bpe_dropout=share)


def test_processes_share_the_windows_of_one(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 4, encoding="utf-8")
    data = TokenData(str(path), vocab_size=300, context_length=16, vocabulary="learn")
    stream = data.prepared.stream("train")
    windows = Grid(len(stream), 16, 0, True)
    one = Respelling(0.2, data.tokenizer.tokens, 0)
    alone = TrainWindows(stream, windows, 4, respelling=one)
    together = [TrainWindows(stream, windows, 2, rank=rank, world_size=2, respelling=one) for rank in (0, 1)]
    for batch in range(5):
        found = torch.cat([each[batch][1] for each in together])
        assert torch.equal(alone[batch][1], found)
