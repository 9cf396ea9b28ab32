import pytest


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch):
    """The loss picture takes a quarter of a tiny run: test_fit.py has one."""
    monkeypatch.setattr("gpt.run.record.loss_curve", lambda *_: None)
