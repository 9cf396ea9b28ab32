from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.data.shards import Stream
from gpt.data.windows import IGNORE_INDEX, EvalWindows, Grid, Packed, TrainWindows, make_batch, permute

EOT = 999


@pytest.fixture
def stream(tmp_path):
    """997 tokens 0, 1, 2, ..."""
    return make_stream(tmp_path, np.arange(997))


def make_stream(folder, ids):
    np.asarray(ids, "<u2").tofile(folder / "tokens.bin")
    return Stream(folder / "tokens.bin", np.dtype("<u2"), EOT)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 10, 99, 100, 101, 1000, 4096, 65537])
def test_a_permutation_has_each_number_once(size):
    values = permute(np.arange(size), size, (1, 2, 3))
    assert sorted(values.tolist()) == list(range(size))


def test_permutations_differ_by_key_and_look_random():
    size = 10_000
    numbers = np.arange(size)
    first, second = (permute(numbers, size, (0, epoch, 0)) for epoch in (0, 1))
    assert (first == second).mean() < 0.001
    assert abs(np.corrcoef(first, numbers)[0, 1]) < 0.04
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.04
    (_, most), *_ = Counter(np.diff(first).tolist()).most_common(1)
    assert most < 20  # of a linear-congruential order, most steps are equal
    assert np.bincount(first[: size // 4] * 4 // size).min() > 550  # each quarter reaches all of them


def test_a_huge_permutation_costs_nothing():
    values = permute(np.arange(10**13 - 1000, 10**13), 10**13, (5,))  # all of them would be 80 terabytes
    assert len(set(values.tolist())) == 1000
    assert 0 <= values.min() < 10**12 < np.median(values) < values.max() < 10**13


def windows_of(count, batch_size, world=1, rank=0, seed=0):
    none = Stream(Path("none"), np.dtype("<u2"), EOT)
    return TrainWindows(none, Grid(count * 4, 4), batch_size, seed, rank, world)


@given(
    count=st.integers(1, 60), batch_size=st.integers(1, 9), world=st.integers(1, 4), seed=st.integers(0, 3)
)
@settings(deadline=None)
def test_each_window_once_an_epoch_without_overlap_between_ranks(count, batch_size, world, seed):
    epochs, total = 3, batch_size * world
    batches = -(-epochs * count // total)
    ranks = [windows_of(count, batch_size, world, rank, seed) for rank in range(world)]
    assert {len(dataset) for dataset in ranks} == {-(-count // total)}
    plans = np.stack([dataset.spans(np.arange(batches))[0] for dataset in ranks], axis=1)  # batches, world, B
    taken = (plans.reshape(-1) // 4)[: epochs * count].reshape(epochs, count)
    for epoch in taken:
        assert sorted(epoch.tolist()) == list(range(count))
    if count > 20:
        assert (taken[0] != taken[1]).any()


def test_a_batch_is_a_function_of_its_number_alone(stream):
    grid = Grid(997, 16, seed=3, shift=True)
    numbers = range(0, 300, 7)  # also of batches that are planned apart
    forwards = TrainWindows(stream, grid, 5, seed=3)
    batches = {number: forwards[number] for number in numbers}
    backwards = TrainWindows(stream, grid, 5, seed=3)
    for number in reversed(numbers):
        torch.testing.assert_close(backwards[number], batches[number], rtol=0, atol=0)
    other = TrainWindows(stream, Grid(997, 16), 5, seed=4)
    assert not torch.equal(other[0][0], batches[0][0])


def test_targets_are_one_ahead_of_inputs(stream):
    dataset = TrainWindows(stream, Grid(997, 16), 7)
    seen = []
    for k in range(len(dataset)):
        x, y = dataset[k]
        assert x.shape == y.shape == (7, 16)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert torch.equal(y - x, torch.where(x == EOT, -EOT, 1))  # <|endoftext|> stands before token 0
        seen += y[:, 0].tolist()
    assert sorted(seen[:62]) == list(range(0, 992, 16))


@given(tokens=st.integers(8, 200), seed=st.integers(0, 5))
@settings(deadline=None)
def test_shifted_grids_stay_inside_and_move(tokens, seed):
    grid = Grid(tokens, 8, seed, shift=True)
    offsets = set()
    for epoch in range(40):
        starts, lengths = grid.spans(np.arange(grid.count), epoch)
        assert set(lengths) == {8}
        assert starts.tolist() == list(range(starts[0], starts[0] + 8 * grid.count, 8))
        assert 0 <= starts[0] < 8
        assert starts[-1] + 8 <= tokens
        offsets.add(int(starts[0]))
    assert len(offsets) >= min(tokens - 8 * grid.count + 1, 8) // 2


def packed_reference(lengths, longest):
    """Document by document: the windows as lists of (document, token) pairs."""
    windows, current = [], []
    for number, length in enumerate(lengths):
        if length <= longest < len(current) + length:
            windows.append(current)
            current = []
        for token in range(length):
            if len(current) == longest:
                windows.append(current)
                current = []
            current.append((number, token))
    return [window for window in [*windows, current] if window]


@given(lengths=st.lists(st.integers(1, 25), min_size=1, max_size=40), longest=st.integers(2, 12))
@settings(deadline=None, max_examples=300)
def test_packed_windows_split_no_short_document(lengths, longest):
    total = sum(lengths)
    if total < longest:
        return
    starts = np.cumsum([0, *lengths[:-1]])
    packed = Packed(starts, total, longest)
    begins, sizes = packed.spans(np.arange(packed.count), 0)
    expected = packed_reference(lengths, longest)
    assert sizes.tolist() == [len(window) for window in expected]
    assert begins.tolist() == [int(starts[document]) + token for (document, token), *_ in expected]


def test_packed_batches_pad_what_is_left(tmp_path):
    stream = make_stream(tmp_path, [1, 2, EOT, 3, 4, 5, EOT, 6, EOT])
    packed = Packed(np.array([0, 3, 7]), 9, 5)
    x, y, document = TrainWindows(stream, packed, 3, isolate=True)[0]
    rows = sorted(zip(y.tolist(), x.tolist(), strict=True))
    none = -100  # the target that `cross_entropy` leaves out by default
    assert rows == [
        ([1, 2, EOT, none, none], [EOT, 1, 2, 0, 0]),
        ([3, 4, 5, EOT, none], [EOT, 3, 4, 5, 0]),
        ([6, EOT, none, none, none], [EOT, 6, 0, 0, 0]),
    ]
    assert not document[y != none].any()


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_predicts_each_token_once_in_order(stream, batch_size, world):
    ranks = [EvalWindows(stream, 16, batch_size, rank, world) for rank in range(world)]
    assert len({len(dataset) for dataset in ranks}) == 1
    targets, inputs = [], []
    for k in range(len(ranks[0])):
        for dataset in ranks:
            x, y = dataset[k]
            assert x.shape == y.shape == (batch_size, 16)
            assert (x[y == IGNORE_INDEX] == 0).all()
            targets += y[y != IGNORE_INDEX].tolist()
            inputs += x[y != IGNORE_INDEX].tolist()
    assert targets == list(range(997))
    assert inputs == [EOT, *range(996)]
    assert (ranks[0][len(ranks[0]) - 1][1] != IGNORE_INDEX).any()  # no batch is padding on all processes


def test_document_ids_count_the_endoftext_tokens(tmp_path):
    stream = make_stream(tmp_path, [5, EOT, 6, 7, EOT, EOT, 8, 9])
    x, _, document = make_batch(stream, (np.array([0, 3]), np.full(2, 4)), 4, isolate=True)
    assert x.tolist() == [[EOT, 5, EOT, 6], [6, 7, EOT, EOT]]
    assert document.tolist() == [[0, 0, 1, 1], [0, 0, 1, 2]]
    assert document.dtype == torch.int64


@pytest.mark.parametrize("start", [0, 1, 90, 984, 985, 986, 990, 996])
def test_rows_cross_the_ends(stream, start):
    whole = [EOT, *range(997), *[0] * 13]
    assert stream.rows(np.array([start]), 12).tolist() == [whole[start : start + 13]]
