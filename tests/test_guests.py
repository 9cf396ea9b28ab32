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
@pytest.mark.parametrize("word", ["vmap", "padding", "400 for chat"])
def test_a_program_that_is_installed_passes(word, tmp_path):
    pytest.importorskip({"vmap": "torch", "padding": "transformers"}.get(word, "openai"))
    ended = subprocess.run(
        [sys.executable, str(ROOT / "scripts/guests.py"), "--only", word, "--json", str(tmp_path / "t.json")],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    rows = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [row["result"] for row in rows] == ["passed"]


def test_a_wrong_result_and_a_missing_program(monkeypatch, capsys, tmp_path):
    wrong = Guest(("torch",), "a text", lambda place: equal("ours", "theirs"))
    missing = Guest(("no-such-package",), "a text", lambda place: None)
    page = tmp_path / "page.md"
    page.write_text(f"Before\n{guests.BEGIN}\nold\n{guests.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["guests.py", "--write", str(page)])
    monkeypatch.setattr(guests, "make_place", lambda folder: nullcontext())
    for listed, status in (((missing,), 0), ((missing, wrong), 1)):
        monkeypatch.setattr(guests, "GUESTS", listed)
        assert guests.main() == status
    text = page.read_text(encoding="utf-8")
    assert "| no-such-package | a text | not installed |" in text
    assert "FAILED: gpt gives 'ours', the program 'theirs'" in text
    assert text.startswith("Before\n") and text.endswith("\nafter\n") and "old" not in text


def test_a_word_of_no_check_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["guests.py", "--only", "abacus"])
    with pytest.raises(SystemExit) as ended:
        guests.main()
    assert ended.value.code == 2 and "abacus" in capsys.readouterr().err
