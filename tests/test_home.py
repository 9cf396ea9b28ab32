"""A user without a home, as in a container."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpt import home
from gpt.files import cache_folder
from gpt.home import ensure_home

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows knows every user's home")


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    for name in ("GPT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/before")  # restored after the test
    yield
    home._temporary().cleanup()
    home._temporary.cache_clear()


def test_without_a_home_a_temporary_folder_is_one_and_a_line_says_so(monkeypatch, capsys):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}[0])  # no entry
    first = cache_folder()
    assert first == cache_folder() and first.parents[1].is_dir()
    told = f"gpt: the user has no home: what is kept for later runs is in {first.parents[1]} and goes at the"
    assert capsys.readouterr().err.startswith(told)


def test_a_home_that_cannot_be_written_is_one_only_for_reading_a_cache(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)  # what a process of root may write is no test
    (tmp_path / ".cache").mkdir()
    assert cache_folder() == tmp_path / ".cache" / "minimal-gpt"
    assert capsys.readouterr().err == ""
    (tmp_path / ".cache").rmdir()
    ensure_home()
    assert Path.home() != tmp_path and f"{tmp_path} cannot be written" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can be another user")
def test_a_user_whom_the_system_does_not_know_can_run_a_command(monkeypatch):
    monkeypatch.delenv("HOME")
    user = ["setpriv", "--reuid", "54321", "--clear-groups"]
    command = [*user, sys.executable, "-m", "gpt", "plan", "--help"]
    done = subprocess.run(command, cwd="/", capture_output=True, encoding="utf-8", check=False)
    if "Permission denied" in done.stderr and "gpt" not in done.stderr:
        pytest.skip("this Python is not for other users")
    assert done.returncode == 0 and "the user has no home" in done.stderr
