"""Checkpoints that are whole or not there."""

import errno
from pathlib import Path

import pytest
import torch
from tiny_runs import fit, result

from gpt.run.save import AtomicCheckpointIO
from gpt.weights.checkpoint import read


def test_the_newest_and_the_best_are_kept(workplace):
    assert fit("--checkpoint_every", "3", "--keep_checkpoints", "3", "--run", "kept") == 0
    folder = Path("runs/kept/checkpoints")
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.ckpt",
        "last.ckpt",
        "step-15.ckpt",
        "step-18.ckpt",
    ]
    for name, step in {"last.ckpt": 20, "step-18.ckpt": 18, "step-15.ckpt": 15}.items():
        assert read(folder / name)["global_step"] == step


class FullDisk:
    """A file on a disk that has room for `room` bytes."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 64, 5_000, 100_000])
def test_a_full_disk_leaves_the_old_checkpoint(room, tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    saved = {"weights": torch.arange(30_000.0)}
    AtomicCheckpointIO().save_checkpoint(saved, path)
    before = path.read_bytes()
    full = lambda *args, **kwargs: FullDisk(open(*args, **kwargs), room)  # noqa: E731, SIM115
    monkeypatch.setattr("gpt.files.open", full, raising=False)
    monkeypatch.setattr(FullDisk, "__enter__", lambda self: self, raising=False)
    monkeypatch.setattr(FullDisk, "__exit__", lambda self, *_: self.file.close(), raising=False)
    with pytest.raises(OSError, match="No space left"):
        AtomicCheckpointIO().save_checkpoint(saved, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_says_that_the_disk_is_full(workplace, monkeypatch, capsys):
    def save(self, checkpoint, path, storage_options=None, original=AtomicCheckpointIO.save_checkpoint):
        if checkpoint["global_step"] >= 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, checkpoint, path)

    with monkeypatch.context() as patch:
        patch.setattr(AtomicCheckpointIO, "save_checkpoint", save)
        assert fit("--checkpoint_every", "4", "--run", "full") == 2
    err = capsys.readouterr().err
    assert err.count("gpt fit: ") == 1
    assert "runs/full/checkpoints/last.ckpt: No space left on device" in err
    assert read("runs/full/checkpoints/last.ckpt")["global_step"] == 8
    assert fit("--resume", "auto", "--run", "full", "--checkpoint_every", "4") == 0
    assert fit("--run", "whole", "--checkpoint_every", "4") == 0
    assert result(Path("runs/full")) == result(Path("runs/whole"))


def test_what_a_kill_left_half_written_is_cleared_away(workplace):
    assert fit("--trainer.max_steps", "2", "--run", "left") == 0
    half = [Path("runs/left/checkpoints/.last.ckpt.x1.tmp"), Path("runs/left/.metrics.csv.x2.tmp")]
    for file in half:
        file.write_bytes(b"half")
    assert fit("--resume", "auto", "--run", "left", "--trainer.max_steps", "3") == 0
    assert not any(file.exists() for file in half)
