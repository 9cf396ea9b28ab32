"""What people see of `gpt COMMAND --help`."""

import re
from itertools import pairwise

import pytest

from gpt.cli import COMMANDS, main


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([*words, "--help"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_it_fits_a_terminal_has_an_example_and_no_words_of_the_program(command, capsys):
    out = help_of(capsys, command)
    assert out.startswith(f"usage: gpt {command}")
    assert f"gpt {command} " in out.split("\n\n", 1)[1]
    assert max(map(len, out.splitlines())) <= 100
    assert not re.search(r"Optional\[|Literal\[|type: |0x|customizes|Rare\.|Elsewhere", out)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"plan"}))
def test_the_meaning_of_each_option_begins_below_it_with_a_small_letter(command, capsys):
    lines = help_of(capsys, command).split("options:\n", 1)[1].splitlines()
    options = [(line, below) for line, below in pairwise(lines) if line.startswith("  -")]
    assert options
    for line, below in options:
        assert re.match(r" {8}(?![A-Z][a-z ])\S", below) or line.startswith("  -h, --help  "), line


def test_an_option_shows_its_values_and_its_default(capsys):
    out = help_of(capsys, "generate")
    assert out.startswith("usage: gpt generate [CHECKPOINT] [--NAME VALUE]...\n")
    assert help_of(capsys, "plot").startswith("usage: gpt plot RUNS... [--NAME VALUE]...\n")
    assert "  --temperature NUMBER\n" in out and "own distribution (default: 0.8)\n" in out
    assert "  --max_new_tokens N\n" in out and "  --device {auto,cpu,cuda,mps}\n" in out
    assert "  --prompt PROMPT\n" in out and "  --interactive [{true,false}]\n" in out
    template = " ".join(help_of(capsys, "prepare").split())
    assert r"the user's message (default: ### Instruction:\n{content}\n\n)" in template


def test_a_value_after_the_options_is_told_where_it_belongs(refusal):
    late = "unrecognized arguments: mine; a value without a name stands before all options"
    assert refusal("runs --folder runs mine") == f"gpt runs: {late} (see 'gpt runs --help')\n"


def test_options_that_a_command_does_not_use_are_left_out(capsys):
    fit = help_of(capsys, "fit", "no-such.txt")  # which is not looked for
    validate = help_of(capsys, "validate")
    assert "--ckpt_path" not in fit and "--ckpt_path" in validate
    assert "--model.optimizer.lr" in fit and "--model.optimizer.lr" not in validate


CHECKPOINT = """--checkpoint CHECKPOINT a run, a checkpoint, an exported or imported folder, gpt2 or
OWNER/NAME on the hub; by default the newest run"""
TEXT = """a text file, a folder, a pattern, a URL, a corpus file (.yaml), a prepared folder, a name of
`data/`, or OWNER/NAME on the hub"""
ALIKE = {CHECKPOINT: "generate evaluate attention serve export", TEXT: "fit evaluate prepare"}


@pytest.mark.parametrize(
    ("command", "words"), [(command, words) for words in ALIKE for command in ALIKE[words].split()]
)
def test_every_command_says_alike_what_a_checkpoint_and_a_text_may_be(command, words, capsys):
    assert " ".join(words.split()) in " ".join(help_of(capsys, command).split())
