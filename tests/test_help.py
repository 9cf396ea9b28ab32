"""What people see of `gpt COMMAND --help`, besides its example, which test_cli.py looks for."""

import re
from typing import Literal

import pytest

from gpt.cli import COMMANDS, main
from gpt.help import value_name


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_it_fits_a_terminal_and_has_no_words_of_the_program(command, capsys):
    out = help_of(command, capsys)
    assert max(map(len, out.splitlines())) <= 100
    assert not re.search(r"Optional\[|Literal\[|type: |0x|customizes|Rare\.|Elsewhere", out)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"plan"}))
def test_every_option_is_explained(command, capsys):
    lines = help_of(command, capsys).split("options:\n", 1)[1].splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if re.match("  -", line):
            assert "  " in line.strip() or following.startswith("     "), line


def test_an_option_shows_its_values_and_its_default(capsys):
    out = help_of("generate", capsys)
    assert "  --temperature NUMBER\n" in out and "own distribution (default: 0.8)\n" in out
    assert "  --device {auto,cpu,cuda,mps}\n" in out
    assert "  --prompt PROMPT\n" in out and "  --interactive [{true,false}]\n" in out


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"plan"}))
def test_the_meaning_of_an_option_begins_below_it_with_a_small_letter(command, capsys):
    options = re.findall(r"^  --.*\n(.*)", help_of(command, capsys), re.M)
    assert options and all(re.match(r" {8}(?![A-Z][a-z ])\S", line) for line in options)


def test_a_value_after_the_options_is_told_where_it_belongs(capsys):
    assert main(["runs", "--folder", "runs", "mine"]) == 2
    late = "unrecognized arguments: mine; a value without a name stands before all options"
    assert capsys.readouterr().err == f"gpt runs: {late} (see 'gpt runs --help')\n"


def test_options_that_a_command_does_not_use_are_left_out(capsys):
    fit, validate = help_of("fit", capsys), help_of("validate", capsys)
    assert "--ckpt_path" not in fit and "--ckpt_path" in validate
    assert "--model.optimizer.lr" in fit and "--model.optimizer.lr" not in validate


def test_the_template_of_prepare_is_explained(capsys):
    out = " ".join(help_of("prepare", capsys).split())
    assert r"the text around a prompt or the user's message (default: ### Instruction:\n{content}\n\n)" in out


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (int, "N"),
        (float | None, "NUMBER"),
        (bool, "{true,false}"),
        (Literal["a", "b"] | None, "{a,b}"),
        (str | None, "PATH"),
    ],
)
def test_what_stands_for_a_value(kind, name):
    assert value_name("data.path", kind) == name
