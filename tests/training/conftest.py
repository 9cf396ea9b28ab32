"""A place for whole runs to happen in."""

from pathlib import Path

import pytest
from tiny_runs import TEXT


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, with a text of about nine steps an epoch."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path
