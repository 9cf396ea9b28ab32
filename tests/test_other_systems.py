"""What differs on Windows and macOS, with their functions faked."""

import io
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt.cli import main
from gpt.files import atomic_write
from gpt.generation.command import ask
from gpt.run import folder, record
from gpt.run.signals import remembered
from gpt.training.guard import Guard
from gpt.weights.load import find


def refuse(*arguments, **options):
    raise AssertionError(f"Windows has no such call: {arguments}")


class WindowsOs:
    """The module `os` of Windows for one file of the package: `os.name` itself decides what a Path is."""

    name, kill = "nt", staticmethod(refuse)

    @staticmethod
    def open(path, *arguments):
        return refuse(path) if Path(path).is_dir() else os.open(path, *arguments)

    def __getattr__(self, name):
        return getattr(os, name)


def test_a_file_is_replaced_without_opening_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt.files.os", WindowsOs())
    with atomic_write(tmp_path / "a.txt") as file:
        file.write("new")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "new"


def test_a_lock_asks_no_process_whether_it_lives(tmp_path, monkeypatch):
    """os.kill(process, 0) is Ctrl-C for a process on Windows."""
    with folder._locked(tmp_path):
        assert folder._holder(tmp_path)["pid"] == os.getpid()
        monkeypatch.setattr(folder, "os", WindowsOs())
        assert not folder._holder_is_dead(tmp_path)


def test_signals_that_windows_lacks(monkeypatch):
    for name in ("SIGHUP", "SIGUSR1"):
        monkeypatch.delattr(signal, name, raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with remembered(Guard()):
        assert all(signal.getsignal(number) != handler for number, handler in before.items())
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.skipif(sys.platform == "win32", reason="there is no module resource")
def test_the_most_memory_is_in_bytes_everywhere(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3_000_000))
    found = {}
    for system in ("linux", "darwin", "win32"):
        monkeypatch.setattr(sys, "platform", system)
        found[system] = record._peak_memory_bytes(torch.device("cpu"))
    assert found == {"linux": 3_072_000_000, "darwin": 3_000_000, "win32": 0}


def test_prompts_are_asked_for_without_readline(monkeypatch):
    monkeypatch.setitem(sys.modules, "readline", None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    assert list(ask()) == ["one", "two"]


def test_a_hub_name_with_backslashes_is_one(monkeypatch):
    asked = []
    monkeypatch.setattr("gpt.weights.load._download", lambda name: asked.append(name) or Path("x"))
    monkeypatch.setattr("gpt.weights.load.os", SimpleNamespace(sep="\\"))
    find("openai-community\\gpt2")
    assert asked == ["openai-community/gpt2"]


def test_a_whole_run_writes_to_a_console_of_1252(tmp_path, text_file, monkeypatch):
    """Its characters go out as escapes where the code page lacks them, and every file is UTF-8."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="cp1252") for _ in range(2)]
    monkeypatch.chdir(tmp_path)
    text = text_file.read_text("utf-8") + "\u4f60\u597d \u2192\n" * 50
    Path("\u4f60.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    small = ["--model.config.vocab_size", "300", "--model.config.emb_dim", "32", "--trainer.max_steps", "2"]
    more = ["--data.vocabulary", "null", "--model.config.num_heads", "2", "--trainer.accelerator", "cpu"]
    assert main(["fit", "--data.corpus", "\u4f60.txt", "--run", "a", *small, *more]) == 0
    assert main(["generate", "--checkpoint", "runs/\u4f60"]) == 2
    for stream in streams:
        stream.flush()
    assert b"\\u4f60" in streams[1].buffer.getvalue()
    assert "\u4f60.txt" in Path("runs/a/config.yaml").read_text(encoding="utf-8")
