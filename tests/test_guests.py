"""The script that runs other people's programs: two that are installed."""

import pytest
from processes import run_script


@pytest.mark.slow
@pytest.mark.parametrize(("word", "package"), [("padding", "transformers"), ("400 for chat", "openai")])
def test_a_program_that_is_installed_passes(word, package):
    pytest.importorskip(package)
    done = run_script("guests.py", "--only", word)
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, *rows = done.stdout.splitlines()
    assert [row.split(" | ")[2] for row in rows] == ["passed |"]
