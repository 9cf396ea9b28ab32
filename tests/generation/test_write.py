import io
import subprocess
import sys

import numpy as np
import pytest
import torch

from gpt import GPT, GPTConfig, Tokenizer
from gpt.cli import main
from gpt.generation import Sampling, stream_samples, write
from tests.generation.conftest import sharp


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    GPT(GPTConfig(vocab_size=257, context_length=32, emb_dim=16, num_heads=2, num_layers=1)).save_pretrained(
        tmp_path
    )
    return str(tmp_path)


def run(capsys, *arguments: str) -> str:
    assert main(["generate", *arguments, "--max_new_tokens", "12"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.3),
        ("min_p", 0.4),
        ("top_k", 2),
        ("temperature", 0.1),
        ("repetition_penalty", 50.0),
    ],
)
def test_each_option_counts(name, value, tmp_path, capsys):
    """After a prompt that is longer than the context."""
    model = sharp(GPTConfig(vocab_size=257, context_length=16, emb_dim=16, num_heads=2, num_layers=1))
    model.save_pretrained(tmp_path)
    prompt, tokenizer = "Once upon a time there was", Tokenizer("gpt2", vocab_size=257)

    def text(sampling: Sampling) -> str:
        pieces = stream_samples(model, tokenizer, prompt, max_new_tokens=30, seed=2, sampling=sampling)
        return "".join(piece for _, piece in pieces)

    expected = text(Sampling(**{name: value}))
    assert expected != text(Sampling())
    command = ["generate", "--checkpoint", str(tmp_path), "--prompt", prompt, "--seed", "2"]
    command += ["--max_new_tokens", "30", "--temperature", "1.0", "--top_k", "null", f"--{name}", str(value)]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{prompt}{expected}\n"


def test_several_samples_have_titles(checkpoint, capsys):
    one = run(capsys, "--checkpoint", checkpoint, "--prompt", "Hi", "--seed", "1")
    three = run(capsys, "--checkpoint", checkpoint, "--prompt", "Hi", "--seed", "1", "--num_samples", "3")
    assert three.startswith(f"--- sample 1\n{one}")
    assert three.count("--- sample") == 3 and three.count("Hi") == 3


def test_int8_says_what_it_needs(built, checkpoint, capsys):
    assert main(["generate", "--checkpoint", checkpoint, "--precision", "int8"]) == 2
    assert "heads whose width 16 divides" in capsys.readouterr().err


def test_prompts_are_asked_for_until_the_end(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nYou\n"))
    out = run(capsys, "--checkpoint", checkpoint, "--interactive", "--prompt", "Once", "--seed", "1")
    assert out.startswith("Once") and "> Hi" in out and "> You" in out
    assert out.count("> ") == 4  # three lines, the empty one passed over, and the end


def test_prompts_that_are_not_utf8_and_no_input_at_all(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert "> caf\ufffd" in run(capsys, "--checkpoint", checkpoint, "--interactive")
    monkeypatch.setattr("sys.stdin", None)  # `<&-`
    assert run(capsys, "--checkpoint", checkpoint, "--interactive") == "\n"


def test_an_interrupt_ends_the_text_and_not_the_loop(capsys, monkeypatch):
    def interrupted(prompt):
        raise KeyboardInterrupt
        yield

    answers = iter(["Hi", KeyboardInterrupt, "You", EOFError])

    def answer(_):
        given = next(answers)
        if isinstance(given, str):
            return given
        raise given

    monkeypatch.setattr("builtins.input", answer)
    assert list(write.ask()) == ["Hi", "You"]


def test_an_encoding_that_lacks_the_characters(checkpoint, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr("sys.stdout", stdout)
    arguments = ["--prompt", "日本 é", "--temperature", "5", "--seed", "1", "--max_new_tokens", "60"]
    assert main(["generate", "--checkpoint", checkpoint, *arguments]) == 0
    stdout.flush()
    assert stdout.buffer.getvalue().decode("cp1252").startswith("?? é")


def test_a_closed_standard_output(checkpoint):
    """`gpt generate >&-`: Python then has no sys.stdout at all."""
    command = [sys.executable, "-m", "gpt.cli", "generate", "--checkpoint", checkpoint]
    command += ["--max_new_tokens", "3"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("option", "value"),
    [("temperature", "-1"), ("max_new_tokens", "-1"), ("stop", "")],
)
def test_bad_input_is_one_line(checkpoint, capsys, option, value):
    assert main(["generate", "--checkpoint", checkpoint, "--prompt", "Hi", f"--{option}", value]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and out == ""


def test_what_is_copied_is_marked_when_the_text_is_complete(checkpoint, capsys, monkeypatch):
    plain = run(capsys, "--checkpoint", checkpoint, "--prompt", "Hi", "--seed", "1", "--num_samples", "2")
    monkeypatch.setattr(write, "training_text", lambda run, tokenizer: np.zeros(0, np.uint16))
    monkeypatch.setattr(write.Copied, "mark", lambda copied, text: f"<{text}>{copied.least}")
    options = ("--num_samples", "2", "--show_copied", "--copied_tokens", "5")
    out = run(capsys, "--checkpoint", checkpoint, "--prompt", "Hi", "--seed", "1", *options)
    assert out.count("Hi<") == out.count(">5\n") == 2
    assert out.replace("Hi<", "Hi").replace(">5\n", "\n") == plain


def test_without_a_run_the_training_text_is_not_known(checkpoint, capsys):
    assert main(["generate", "--checkpoint", checkpoint, "--show_copied"]) == 2
    assert "the training text is not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"), [(r"\n", "\n"), (r"\t", "\t"), ("#", "#"), ("~", "~"), ("]", "]")]
)
def test_a_text_ends_before_the_stop_string_that_was_typed(typed, meant, checkpoint, capsys):
    command = ["generate", "--checkpoint", checkpoint, "--prompt", "Hi", "--seed", "3"]
    command += ["--temperature", "1", "--top_k", "null", "--max_new_tokens", "1000"]
    assert main(command) == 0
    whole = capsys.readouterr().out
    assert meant in whole[:-1]
    assert main([*command, "--stop", "not there", "--stop", typed]) == 0
    assert capsys.readouterr().out == f"{whole.partition(meant)[0]}\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("marks", [False, True])
def test_a_model_cannot_write_to_the_clipboard_of_a_terminal(marks, monkeypatch):
    from gpt.generation.write import _show

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("NO_COLOR", "1")  # the prompt's colour is ours
    pieces = iter([(0, "\x1b]52;c;"), (0, "aGk=\x07\n")])
    text = _show("P", pieces, 1, (lambda text: f"[[{text}]]") if marks else None)
    assert text == "\x1b]52;c;aGk=\x07\n"  # what a chat remembers
    assert terminal.getvalue().strip("[]P\n") == "\\x1b]52;c;aGk=\\x07"
