import numpy as np
import pytest
import torch
from matplotlib.image import imread
from PIL import Image, ImageSequence

from gpt import GPT, Tokenizer
from gpt.cli import main
from gpt.pictures import probabilities
from gpt.pictures.probabilities import COLUMNS, shaded_text, token_probabilities
from tests.conftest import TINY
from tests.snapshots import add_snapshot

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


@pytest.fixture
def run(tmp_path, config):
    """A run with snapshots of three models."""
    for step in (1, 2, 12):
        torch.manual_seed(step)
        add_snapshot(tmp_path / "run", step, GPT(config), TOKENIZER)
    return tmp_path / "run"


def frames(path):
    with Image.open(path) as picture:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(picture)]


def test_snapshots_make_an_animation(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    drawn = []
    monkeypatch.setattr(probabilities, "shaded_text", lambda *args: drawn.append(args) or shaded_text(*args))
    assert main(["probabilities", "--checkpoint", str(run), "--text", "hi you", "--snapshots"]) == 0
    assert capsys.readouterr().out == "probabilities.gif shows 5 tokens in 3 frames\n"
    found = frames(tmp_path / "probabilities.gif")
    assert len(found) == 3 and len({frame.tobytes() for frame in found}) == 3
    for (values, _, step), number in zip(drawn, (1, 2, 12), strict=True):
        torch.manual_seed(number)
        model = GPT(TINY)
        model.load_state_dict({name: t.bfloat16().float() for name, t in model.state_dict().items()})
        assert step == f"step {number}"
        assert values == pytest.approx(token_probabilities(model.eval(), TOKENIZER, "hi you")[0], rel=1e-5)


def test_what_cannot_be_animated_is_one_line(run, model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    output = tmp_path / "new.gif"

    def refused(checkpoint, text="hi", *more):
        words = ["--checkpoint", str(tmp_path / checkpoint), "--text", text, "--output", str(output), *more]
        assert main(["probabilities", "--snapshots", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and not output.exists()
        return error

    assert "is of no run with snapshots" in refused("model")
    assert "no checkpoint at" in refused("nowhere")
    assert "more than the context_length 16" in refused("run", "x" * 17)
    output = output.with_suffix(".svg")
    assert "ends in .gif" in refused("run")
    damaged = next(run.glob("snapshots/step-2-*"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert f"{damaged} is damaged" in refused("run")
