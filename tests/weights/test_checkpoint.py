"""Which checkpoint is the newest, whatever the clocks say."""

import os
from pathlib import Path

import pytest
import torch

from gpt.weights.checkpoint import checkpoints_of, newest_run, next_session
from gpt.weights.load import find


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Writes a checkpoint's header; the first ones have the newest times, and files all the same."""
    monkeypatch.chdir(tmp_path)
    clock = iter(range(1000, 0, -1))

    def write(name: str, **order: int) -> Path:
        path = Path("runs") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"gpt": {}, "state_dict": {}, "run": {"saved_at": next(clock), **order}}, path)
        os.utime(path, (0, 0))
        return path

    return write


def test_a_later_save_is_newer_and_a_later_session_newer_still(save):
    old = save("a/checkpoints/step-900.ckpt", session=1, save=9)
    resumed = save("a/checkpoints/step-50.ckpt", session=2, save=1)
    last = save("a/checkpoints/last.ckpt", session=2, save=2)
    slurm = save("a/hpc_ckpt_1.ckpt", session=2, save=3)
    assert checkpoints_of(Path("runs/a")) == [slurm, last, resumed, old]


def test_checkpoints_without_a_session_are_older_and_in_the_order_of_their_times(save):
    second, first = save("a/checkpoints/last.ckpt"), save("a/checkpoints/step-1.ckpt")
    new = save("a/checkpoints/best.ckpt", session=1, save=1)
    assert checkpoints_of(Path("runs/a")) == [new, second, first]


def test_the_newest_run_is_the_one_started_or_resumed_last(save):
    save("a/checkpoints/last.ckpt", session=3, save=1)
    save("b/checkpoints/last.ckpt", session=2, save=70)
    assert newest_run() == Path("runs/a")
    assert find() == Path("runs/a/checkpoints/last.ckpt")
    assert next_session(Path("elsewhere")) == 4


def test_a_broken_file_is_listed_first_but_makes_no_run_the_newest(save):
    save("a/checkpoints/last.ckpt", session=1, save=1)
    intact = save("b/checkpoints/step-1.ckpt")
    broken = Path("runs/b/checkpoints/last.ckpt")
    broken.write_bytes(b"PK half of a file")
    assert checkpoints_of(Path("runs/b")) == [broken, intact]
    assert checkpoints_of(Path("runs/b"), broken_first=False) == [intact, broken]
    assert newest_run() == Path("runs/a")


def test_nothing_is_no_run(save):
    assert newest_run() is None
    assert next_session(Path("runs/a")) == 1
