"""A kill at any write of a run: it resumes as the run that was never interrupted, and its best is there."""

import errno
import os
import shutil

import pytest
from tiny_runs import checkpoint, fit, result

RUN = """--snapshot_megabytes 0 --trainer.val_check_interval 8 --checkpoint_every 6
--model.optimizer.name adamw --trainer.max_steps 11"""


class Killed(BaseException):
    """What nothing handles."""


def ended(run: str) -> tuple:
    """All that the run restores, and its best."""
    best = checkpoint(run, "best").run
    assert best.step == best.best_step
    return result(run), best.step, best.best_loss


@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_kill_at_any_write_loses_nothing(links, workplace, monkeypatch):
    """Also between `last` and `best` of the last update, and where a file system knows no links."""
    assert fit(f"--run whole {RUN}") == 0
    wanted = ended("whole")
    assert wanted[1] == 11
    writes = deadly = 0

    def replace(*names, original=os.replace, **folders):
        nonlocal writes
        writes += 1
        if writes == deadly:
            raise Killed
        original(*names, **folders)

    def link(*names, original=os.link, **folders):
        if not links:
            raise OSError(errno.EPERM, "no links")
        replace(*names, original=original, **folders)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "link", link)
    while writes >= deadly:  # until a run ends before the next kill
        writes, deadly = 0, deadly + 1
        try:
            assert fit(f"--run cut --resume auto_or_new {RUN}") == 0
        except Killed:
            assert fit(f"--run cut --resume auto_or_new {RUN}") == 0
        assert ended("cut") == wanted, deadly
        shutil.rmtree("runs/cut")
    assert deadly > 9
