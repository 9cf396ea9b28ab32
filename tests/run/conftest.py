import shutil
from pathlib import Path

import pytest
from tiny_runs import run_in


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch):
    """The loss picture takes a quarter of a tiny run: test_fit.py has one."""
    monkeypatch.setattr("gpt.run.fit.loss_curve", lambda *_: None)


@pytest.fixture(scope="session")
def two_steps(tmp_path_factory) -> Path:
    """The folder of a run of two steps, for those that only look at it."""
    return run_in(tmp_path_factory.mktemp("two"), "--trainer.max_steps", "2")


@pytest.fixture
def mine(two_steps, workplace) -> Path:
    """A copy of it, and the text, to work with."""
    return Path(shutil.copytree(two_steps, "runs/mine"))
