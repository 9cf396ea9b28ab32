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


@pytest.fixture
def clock(monkeypatch):
    """Lets time pass only in updates: an eighth of a second in each, and `first` more in the first."""
    from gpt.training.module import LanguageModel
    from gpt.training.record import Meter

    seconds, rates = 0.0, []

    def install(first: float = 0.0) -> list[float]:
        def clip(self, optimizer, *args, original=LanguageModel.configure_gradient_clipping, **options):
            nonlocal seconds, first
            seconds, first = seconds + 0.125 + first, 0.0
            rates.append(optimizer.param_groups[0]["lr"])
            return original(self, optimizer, *args, **options)

        monkeypatch.setattr(LanguageModel, "configure_gradient_clipping", clip)
        monkeypatch.setattr(Meter, "elapsed", lambda self: seconds)
        return rates

    return install
