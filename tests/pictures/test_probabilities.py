import io

import pytest
import torch
from matplotlib.image import imread

from gpt import Tokenizer
from gpt.cli import main
from gpt.pictures.probabilities import COLUMNS, shaded_text, token_probabilities

TOKENIZER = Tokenizer("gpt2", vocab_size=300)


def test_probabilities_are_the_softmax_of_the_token_before(model):
    text = "a\nüb"
    found, labels = token_probabilities(model, TOKENIZER, text)
    ids = TOKENIZER.encode(text)
    for position, token in enumerate(ids):
        before = torch.tensor([[TOKENIZER.eot, *ids[:position]]])
        expected = model(before)[0, -1].softmax(-1)[token].item()
        assert found[position] == pytest.approx(expected, rel=1e-5)
    assert labels == ["a", "↵", "c3", "bc", "b"]


def test_less_likely_tokens_are_darker_and_all_are_inside_the_picture():
    figure = shaded_text([1.0, 0.5, 1e-3, 1e-4, 1e-9] * 9, ["word " * 2] * 45)
    patches = figure.axes[0].patches
    shades = [sum(patch.get_facecolor()[:3]) for patch in patches[:5]]
    assert shades[0] > shades[1] > shades[2] > shades[3] == shades[4]
    assert all(patch.get_x() >= 0 and patch.get_x() + patch.get_width() <= COLUMNS for patch in patches)
    corners = {(patch.get_x(), patch.get_y()) for patch in patches}
    assert len(corners) == 45
    assert max(y for _, y in corners) < figure.axes[0].get_ylim()[0]


def test_a_line_end_begins_a_new_row():
    figure = shaded_text([0.5] * 3, ["a", "↵", "b"])
    rows = [int(patch.get_y()) for patch in figure.axes[0].patches]
    assert rows == [0, 0, 1]


def test_the_command(model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    options = ["probabilities", "--checkpoint", str(tmp_path / "model"), "--output", str(tmp_path / "p.png")]
    assert main([*options, "--text", "hi $x^2$ 🤖"]) == 0
    assert imread(tmp_path / "p.png").ndim == 3
    assert main([*options, "--text", "again"]) == 2
    assert (
        "p.png exists already: choose another name, or replace it with --overwrite" in capsys.readouterr().err
    )
    options.append("--overwrite")
    assert main([*options, "--text", "again"]) == 0
    assert main(options) == 2
    assert "--text" in capsys.readouterr().err
    assert main([*options, "--text", "x" * 17]) == 2
    assert "17 tokens, more than the context_length 16" in capsys.readouterr().err


def test_a_path_that_the_terminal_cannot_print(model, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr("sys.stdout", stdout)
    command = ["probabilities", "--checkpoint", "model", "--text", "hi", "--output", "日.svg"]
    assert main(command) == 0
    stdout.flush()
    assert stdout.buffer.getvalue().strip() == b"\\u65e5.svg shows 2 tokens"
    assert (tmp_path / "日.svg").is_file()
