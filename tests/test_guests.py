"""The script that runs other people's programs: two that are installed."""

import json

import pytest
from processes import run_script


@pytest.mark.slow
@pytest.mark.parametrize(("word", "package"), [("padding", "transformers"), ("400 for chat", "openai")])
def test_a_program_that_is_installed_passes(word, package, tmp_path):
    pytest.importorskip(package)
    done = run_script("guests.py", "--only", word, "--json", tmp_path / "table.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "table.json").read_text("utf-8"))
    assert [row["result"] for row in rows] == ["passed"]
