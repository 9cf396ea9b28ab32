"""A kill at any write of a run: it resumes as the run that was never interrupted, and its best is there."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from tiny_runs import fit, result

from gpt.weights.checkpoint import read

RUN = "--snapshot_megabytes 0 --trainer.val_check_interval 8 --checkpoint_every 6"
RUN += " --model.optimizer.name adamw --trainer.max_steps 11"


class Killed(BaseException):
    """What nothing handles."""


def ended(run: str) -> tuple:
    """All that the run restores, and its best."""
    folder = Path("runs") / run
    best = read(folder / "checkpoints" / "best.safetensors")
    assert best.run.step == best.run.best_step
    return result(folder), best.run.step, best.run.best_loss


@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_kill_at_any_write_loses_nothing(links, workplace, monkeypatch):
    """Also between `last` and `best` of the last update, and where a file system knows no links."""
    assert fit(f"--run whole {RUN}") == 0
    wanted = ended("whole")
    assert wanted[1] == 11
    replace, link = os.replace, os.link
    made, number = 0, 0

    def count() -> None:
        nonlocal made
        made += 1
        if made == number:
            raise Killed

    def replaced(*names, **folders):
        count()
        replace(*names, **folders)

    def linked(*names, **folders):
        if not links:
            raise OSError(errno.EPERM, "no links")
        count()
        link(*names, **folders)

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "link", linked)
    while made >= number:  # until a run ends before the next kill
        made, number = 0, number + 1
        try:
            assert fit(f"--run cut --resume auto_or_new {RUN}") == 0
        except Killed:
            survived, number = number, -number
            assert fit(f"--run cut --resume auto_or_new {RUN}") == 0
            number = survived
            made = number
        assert ended("cut") == wanted, number
        shutil.rmtree("runs/cut")
    assert number > 9
