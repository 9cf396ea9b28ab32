"""What differs on Windows and macOS, with their functions faked."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

from tiny_runs import fit, gpt

from gpt.weights.load import find


def test_a_hub_name_with_backslashes_is_one(monkeypatch):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or "x")
    monkeypatch.setattr("gpt.weights.load.os", SimpleNamespace(sep="\\"))
    find("openai-community\\gpt2")
    assert asked == ["openai-community/gpt2"]


def test_a_whole_run_writes_to_a_console_of_1252(workplace, text_file, monkeypatch):
    """Its characters go out as escapes where the code page lacks them, and every file is UTF-8."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="cp1252") for _ in range(2)]
    text = text_file.read_text("utf-8") + "\u4f60\u597d \u2192\n" * 50
    Path("\u4f60.txt").write_text(text, "utf-8")
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    assert fit("--data.corpus \u4f60.txt --run a --trainer.max_steps 2") == 0
    assert gpt("generate --checkpoint runs/\u4f60") == 2
    for stream in streams:
        stream.flush()
    assert b"\\u4f60" in streams[1].buffer.getvalue()
    assert "\u4f60.txt" in Path("runs/a/config.yaml").read_text("utf-8")
