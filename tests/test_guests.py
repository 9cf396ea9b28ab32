"""The script that runs other people's programs: those that are installed, and one that is wrong."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import guests
import pytest
from programs.common import Guest, equal

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("word", ["padding", "400 for chat"])
def test_a_program_that_is_installed_passes(word, tmp_path):
    pytest.importorskip({"padding": "transformers"}.get(word, "openai"))
    ended = subprocess.run(
        [sys.executable, str(ROOT / "scripts/guests.py"), "--only", word, "--json", str(tmp_path / "t.json")],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    rows = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [row["result"] for row in rows] == ["passed"]


def test_a_wrong_result_and_a_missing_program(monkeypatch, capsys):
    wrong = Guest(("torch",), "a text", lambda place: equal("ours", "theirs"))
    missing = Guest(("no-such-package",), "a text", lambda place: None)
    monkeypatch.setattr(sys, "argv", ["guests.py"])
    monkeypatch.setattr(guests, "make_place", lambda folder: nullcontext())
    assert guests.main([missing]) == 0
    assert guests.main([missing, wrong]) == 1
    out = capsys.readouterr().out
    assert "| no-such-package | a text | not installed |" in out
    assert "FAILED: gpt gives 'ours', the program 'theirs'" in out
