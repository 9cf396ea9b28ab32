import numpy as np
import pytest
from matplotlib.image import imread
from tiny_runs import gpt

from gpt.pictures.runs import Metrics, compare, loss_curve

HEADER = "step,tokens,seconds,train_loss,learning_rate,gradient_norm,tokens_per_second,val_loss\n"


@pytest.fixture
def run(tmp_path):
    def make(name: str, shift: float = 0.0, text: str | None = None):
        rows = [f"{s},{s * 100},{s / 2},{5 - s / 10 + shift},0.001,{0.5 + s},2000,\n" for s in range(1, 21)]
        rows.insert(10, f"10,1000,5,,,,,{4.5 + shift}\n")
        rows.append(f"20,2000,10,,,,,{3.5 + shift}\n")
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.csv").write_text(HEADER + "".join(rows) if text is None else text, "utf-8")
        return folder

    return make


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def lines(axes):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]


def test_the_curves_are_the_rows(run):
    (losses,) = compare([Metrics.read(run("a")), Metrics.read(run("b", 1.0))], "tokens").axes
    curves = losses.get_lines()
    steps = np.arange(1, 21)
    for shift, (train, val) in enumerate([curves[:2], curves[2:]]):
        np.testing.assert_allclose(train.get_xydata().T, [steps * 100, 5 - steps / 10 + shift])
        np.testing.assert_allclose(val.get_xydata(), [[1000, 4.5 + shift], [2000, 3.5 + shift]])
    assert losses.get_xlabel() == "tokens"
    assert legend(losses) == ["a: 3.500", "b: 4.500"]


def test_a_name_that_matplotlib_would_hide_or_cannot_draw_is_in_the_legend(run):
    (losses,) = compare([Metrics.read(run(name)) for name in ("世", "$b", "_c")]).axes
    assert legend(losses) == ["U+4E16: 3.500", r"\$b: 3.500", " _c: 3.500"]


def test_runs_with_other_vocabularies_are_drawn_in_bits_per_byte(run):
    header = "step,train_loss,val_loss,val_bits_per_byte\n"
    long_tokens = Metrics.read(run("long", text=f"{header}1,6.0,,\n1,,5.0,2.5\n2,4.0,,\n2,,4.0,2.0\n"))
    short_tokens = Metrics.read(run("short", text=f"{header}1,2.0,,\n1,,1.0,2.0\n2,,inf,inf\n"))
    (losses,) = compare([long_tokens, short_tokens]).axes
    assert losses.get_ylabel() == "loss (bits per byte)"
    assert [y for _, y in lines(losses)] == [[3.0, 2.0], [2.5, 2.0], [4.0], [2.0]]
    assert legend(losses) == ["long: 2.000", "short: 2.000"]
    (losses,) = compare([long_tokens, Metrics.read(run("without"))]).axes
    assert losses.get_ylabel() == "loss (nats per token)"
    assert lines(losses)[1] == ([1.0, 2.0], [5.0, 4.0])


def test_the_picture_of_one_run_names_both_losses(run, tmp_path):
    (losses,) = compare([Metrics.read(run("a"))]).axes
    assert legend(losses) == ["training loss", "held-out loss: 3.500"]
    loss_curve(run("x_y$") / "metrics.csv", tmp_path / "loss.png")
    assert imread(tmp_path / "loss.png").shape == (540, 960, 4)


def test_values_that_are_not_finite_are_left_out(run):
    metrics = Metrics.read(run("old", text="step,train_loss,val_loss\n1,nan,\n2,1.0,1.5\n"))
    assert lines(compare([metrics]).axes[0]) == [([2.0], [1.0]), ([2.0], [1.5])]


def test_the_command_writes_png_and_svg(run, tmp_path, refusal, capsys):
    plot = f"plot {run('one_$name^')} {run('a$x^$')} --output {tmp_path}"
    assert gpt(f"{plot}/a.png --x seconds") == 0
    assert imread(tmp_path / "a.png").shape == (540, 960, 4)
    assert "a.png exists already" in refusal(f"{plot}/a.png")
    assert gpt(f"{plot}/deep/a.svg") == 0
    assert "<svg" in (tmp_path / "deep" / "a.svg").read_text("utf-8")
    assert f"a.svg shows {tmp_path}/one_$name^, {tmp_path}/a$x^$\n" in capsys.readouterr().out


BAD_METRICS = {
    "no rows": (HEADER.encode(), "no rows yet"),
    "no number": (b"step,val_loss\n1,x\n", "invalid: could not convert string to float: 'x'"),
    "no text": (b"step,val_loss\n\xff\xfe", "is no metrics.csv of a run: 'utf-8' codec can't decode"),
    "another table": (b"# title\nOne, two, and three.\n", "have no column step, only # title"),
}


@pytest.mark.parametrize(("content", "message"), BAD_METRICS.values(), ids=BAD_METRICS)
def test_metrics_that_cannot_be_read(content, message, tmp_path, refusal):
    (tmp_path / "metrics.csv").write_bytes(content)
    assert message in refusal("plot", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("nowhere", "no metrics at nowhere"), ("good --output a.pdf", "ends in .png or .svg")],
)
def test_bad_input_is_one_line(arguments, message, run, workplace, refusal):
    run("good")
    assert message in refusal(f"plot {arguments}")
