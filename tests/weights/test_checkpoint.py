"""Which checkpoint is the newest, whatever the clocks say."""

import os
from pathlib import Path

import pytest
import torch

from gpt.weights.checkpoint import ModelPart, RunPart, checkpoints_of, newest_run, next_session
from gpt.weights.checkpoint import write as write_checkpoint
from gpt.weights.load import find


@pytest.fixture
def save(tmp_path, monkeypatch):
    """Writes a checkpoint's header; the first ones have the newest times, and files all the same."""
    monkeypatch.chdir(tmp_path)
    clock = iter(range(1000, 0, -1))

    def write(name: str, **order: int) -> Path:
        path = Path("runs") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        run = RunPart(**{"saved_at": float(next(clock)), "step": 1, "total": 1} | order)
        empty = dict.fromkeys(("tokenizer", "template", "adapters"))
        with path.open("wb") as file:
            write_checkpoint(file, {"w": torch.zeros(1)}, ModelPart(config={}, **empty), run)
        os.utime(path, (0, 0))
        return path

    return write


def test_a_later_save_is_newer_and_a_later_session_newer_still(save):
    old = save("a/checkpoints/step-900.safetensors", session=1, save=9)
    resumed = save("a/checkpoints/step-50.safetensors", session=2, save=1)
    last = save("a/checkpoints/last.safetensors", session=2, save=2)
    assert checkpoints_of(Path("runs/a")) == [last, resumed, old]


def test_the_newest_run_is_the_one_that_saved_last(save, capsys):
    assert newest_run() is None
    save("b/checkpoints/last.safetensors", session=2, save=70, saved_at=5.0)
    save("a/checkpoints/last.safetensors", session=3, save=1, saved_at=6.0)
    assert newest_run() == Path("runs/a")
    assert find() == Path("runs/a/checkpoints/last.safetensors")
    assert "taking the newest run, runs/a" in capsys.readouterr().err
    assert next_session(Path("runs/a")) == 4
    assert next_session(Path("elsewhere")) == 1  # whatever stands in other runs


def test_a_broken_file_is_listed_first_but_makes_no_run_the_newest(save):
    save("a/checkpoints/last.safetensors", saved_at=9.0)
    intact = save("b/checkpoints/step-1.safetensors", saved_at=8.0)
    broken = Path("runs/b/checkpoints/last.safetensors")
    broken.write_bytes(b"PK half of a file")
    assert checkpoints_of(Path("runs/b")) == [broken, intact]
    assert checkpoints_of(Path("runs/b"), broken_first=False) == [intact, broken]
    assert newest_run() == Path("runs/a")
