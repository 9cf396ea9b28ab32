from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.data.prepared import Stream
from gpt.data.windows import IGNORE_INDEX, EvalWindows, Grid, Packed, TrainWindows, make_batch, permute

EOT = 999


@pytest.fixture
def stream(tmp_path):
    """997 tokens 0, 1, 2, ..."""
    return make_stream(tmp_path, np.arange(997))


def make_stream(folder, ids):
    np.asarray(ids, "<u2").tofile(folder / "tokens.bin")
    return Stream(folder / "tokens.bin", np.dtype("<u2"), EOT)


def test_permutations_have_each_number_once_differ_by_key_and_look_random():
    size = 10_000
    first, second = (permute(np.arange(size), size, (0, epoch, 0)) for epoch in (0, 1))
    assert (np.sort(first) == np.arange(size)).all()
    assert (first == second).mean() < 0.001
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.04
    _, counts = np.unique(np.diff(first), return_counts=True)
    assert counts.max() < 20  # of a linear-congruential order, most steps are equal
    assert np.bincount(first[: size // 4] * 4 // size).min() > 550  # each quarter reaches all of them


def test_a_huge_permutation_costs_nothing():
    values = permute(np.arange(10**13 - 1000, 10**13), 10**13, (5,))  # all of them would be 80 terabytes
    assert len(set(values.tolist())) == 1000
    assert 0 <= values.min() < 10**12 < values.max() < 10**13


@given(
    count=st.integers(1, 60), batch_size=st.integers(1, 9), world=st.integers(1, 4), seed=st.integers(0, 3)
)
@settings(deadline=None)
def test_each_window_once_an_epoch_without_overlap_between_ranks(count, batch_size, world, seed):
    none = Stream(Path("none"), np.dtype("<u2"), EOT)
    ranks = [TrainWindows(none, Grid(count * 4, 4), batch_size, seed, rank, world) for rank in range(world)]
    assert {len(dataset) for dataset in ranks} == {-(-count // (batch_size * world))}
    batches = np.arange(3 * len(ranks[0]))
    starts = np.stack([dataset.spans(batches)[0] for dataset in ranks], axis=1)  # batches, world, B
    epochs = (starts.ravel() // 4)[: 3 * count].reshape(3, count)
    assert (np.sort(epochs) == np.arange(count)).all()
    assert count <= 20 or (epochs[0] != epochs[1]).any()


def test_a_batch_is_a_function_of_its_number_alone(stream):
    forwards, backwards = (TrainWindows(stream, Grid(997, 16, 3, shift=True), 5, seed=3) for _ in range(2))
    numbers = range(0, 300, 7)  # also of batches that are planned apart
    batches = {number: forwards[number] for number in numbers}
    for number in reversed(numbers):
        assert all(map(torch.equal, backwards[number], batches[number]))


@given(tokens=st.integers(8, 200), seed=st.integers(0, 5))
@settings(deadline=None)
def test_shifted_grids_stay_inside_and_move(tokens, seed):
    grid = Grid(tokens, 8, seed, shift=True)
    offsets = set()
    for epoch in range(40):
        starts, lengths = grid.spans(np.arange(grid.count), epoch)
        assert set(lengths) == {8}
        assert (starts == starts[0] + 8 * np.arange(grid.count)).all()
        assert 0 <= starts[0] < 8 and starts[-1] + 8 <= tokens
        offsets.add(starts[0])
    assert len(offsets) >= min(tokens - 8 * grid.count + 1, 8) // 2


def packed_reference(lengths, longest):
    """Document by document: the windows as lists of the numbers of their tokens."""
    windows, current, number = [], [], 0
    for length in lengths:
        if length <= longest < len(current) + length:
            windows.append(current)
            current = []
        for _ in range(length):
            if len(current) == longest:
                windows.append(current)
                current = []
            current.append(number)
            number += 1
    return [window for window in [*windows, current] if window]


@given(lengths=st.lists(st.integers(1, 25), min_size=1, max_size=40), longest=st.integers(2, 12))
@settings(deadline=None, max_examples=300)
def test_packed_windows_split_no_short_document(lengths, longest):
    starts = np.cumsum([0, *lengths[:-1]])
    packed = Packed(starts, sum(lengths), longest)
    begins, sizes = packed.spans(np.arange(packed.count), 0)
    expected = packed_reference(lengths, longest)
    assert sizes.tolist() == list(map(len, expected))
    assert begins.tolist() == [window[0] for window in expected]


def test_packed_batches_pad_what_is_left(tmp_path):
    stream = make_stream(tmp_path, [1, 2, EOT, 3, 4, 5, EOT, 6, EOT])
    x, y = TrainWindows(stream, Packed(np.array([0, 3, 7]), 9, 5), 3)[0]
    none = -100  # the target that `cross_entropy` leaves out by default
    assert sorted(zip(y.tolist(), x.tolist(), strict=True)) == [
        ([1, 2, EOT, none, none], [EOT, 1, 2, 0, 0]),
        ([3, 4, 5, EOT, none], [EOT, 3, 4, 5, 0]),
        ([6, EOT, none, none, none], [EOT, 6, 0, 0, 0]),
    ]


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_predicts_each_token_once_in_order(stream, batch_size, world):
    ranks = [EvalWindows(stream, 16, batch_size, rank, world) for rank in range(world)]
    assert {len(dataset) for dataset in ranks} == {-(-63 // (batch_size * world))}
    batches = [dataset[number] for number in range(len(ranks[0])) for dataset in ranks]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    scored = y != IGNORE_INDEX
    assert y[scored].tolist() == list(range(997))
    assert x[scored].tolist() == [EOT, *range(996)]
    assert not x[~scored].any()


def test_document_ids_count_the_endoftext_tokens(tmp_path):
    stream = make_stream(tmp_path, [5, EOT, 6, 7, EOT, EOT, 8, 9])
    x, _, document = make_batch(stream, (np.array([0, 3]), np.full(2, 4)), 4, isolate=True)
    assert x.tolist() == [[EOT, 5, EOT, 6], [6, 7, EOT, EOT]]
    assert document.tolist() == [[0, 0, 1, 1], [0, 0, 1, 2]]
