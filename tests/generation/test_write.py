import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny_runs import gpt

from gpt import GPT, GPTConfig, Tokenizer
from gpt.generation import Sampling, stream_samples, write
from tests.generation.conftest import sharp

BYTES = Tokenizer("gpt2", vocab_size=257)


@pytest.fixture
def checkpoint(tmp_path) -> str:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=257, context_length=32, emb_dim=16, num_heads=2, num_layers=1)
    GPT(config).save_pretrained(tmp_path)
    return f"generate --checkpoint {tmp_path}"


@pytest.fixture
def generate(checkpoint, capsys):
    """Runs `gpt generate` on the checkpoint, and gives what it prints."""

    def run(options: str) -> str:
        assert gpt(f"{checkpoint} --max_new_tokens 12 {options}") == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 0.3), ("min_p", 0.4), ("top_k", 2), ("temperature", 0.1), ("repetition_penalty", 50.0)],
)
def test_each_option_counts(name, value, tmp_path, capsys):
    """After a prompt that is longer than the context."""
    model = sharp(GPTConfig(vocab_size=257, context_length=16, emb_dim=16, num_heads=2, num_layers=1))
    model.save_pretrained(tmp_path)
    prompt = "Once-upon-a-time-there-was"

    def text(**sampling) -> str:
        how = {"max_new_tokens": 30, "seed": 2, "sampling": Sampling(**sampling)}
        return prompt + "".join(piece for _, piece in stream_samples(model, BYTES, prompt, **how))

    options = f"--seed 2 --max_new_tokens 30 --temperature 1.0 --top_k null --{name} {value}"
    assert gpt(f"generate --checkpoint {tmp_path} --prompt {prompt} {options}") == 0
    assert capsys.readouterr().out == f"{text(**{name: value})}\n" != f"{text()}\n"


HI = "--prompt Hi --seed 1"


def test_several_samples_have_titles(generate):
    three = generate(f"{HI} --num_samples 3")
    assert three.startswith(f"--- sample 1\n{generate(HI)}")
    assert three.count("--- sample") == 3 and three.count("Hi") == 3


def test_a_rounding_says_what_it_needs(checkpoint, refusal, built):
    assert "heads whose width 16 divides" in refusal(f"{checkpoint} --precision int8")


def test_prompts_are_asked_for_until_the_end(generate, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n\nYou\n"))
    out = generate("--interactive --prompt Once --seed 1")
    assert out.startswith("Once") and "> Hi" in out and "> You" in out
    assert out.count("> ") == 4  # three lines, the empty one passed over, and the end


def test_prompts_that_are_not_utf8_and_no_input_at_all(generate, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert "> caf\ufffd" in generate("--interactive")
    monkeypatch.setattr("sys.stdin", None)  # `<&-`
    assert generate("--interactive") == "\n"


def test_an_interrupt_ends_the_text_and_not_the_loop(monkeypatch):
    answers = iter(["Hi", KeyboardInterrupt, "You", EOFError])

    def answer(_):
        given = next(answers)
        if isinstance(given, str):
            return given
        raise given

    monkeypatch.setattr("builtins.input", answer)
    assert list(write.ask()) == ["Hi", "You"]


def test_a_chat_remembers_what_was_written_before_an_interrupt(monkeypatch):
    def pieces():
        yield 0, "Hel"
        yield 1, "other sample"
        yield 0, "lo"
        raise KeyboardInterrupt

    reply = {"role": "assistant", "content": ""}
    with pytest.raises(KeyboardInterrupt):
        list(write.noted(pieces(), reply))
    assert reply["content"] == "Hello"


def test_an_encoding_that_lacks_the_characters(checkpoint, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr("sys.stdout", stdout)
    assert gpt(f"{checkpoint} --prompt 日本-é --temperature 5 --seed 1 --max_new_tokens 60") == 0
    stdout.flush()
    assert stdout.buffer.getvalue().decode("cp1252").startswith("??-é")


def test_a_closed_standard_output(checkpoint):
    """`gpt generate >&-`: Python then has no sys.stdout at all."""
    command = f"{sys.executable} -m gpt.cli {checkpoint} --max_new_tokens 3 >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--temperature -1", "temperature"),
        ("--stop=", "stop"),
        ("--show_copied", "training text is not known"),
    ],
)
def test_bad_input_is_one_line(options, message, checkpoint, refusal):
    assert message in refusal(f"{checkpoint} {options}")


def test_what_is_copied_is_marked_when_the_text_is_complete(generate, monkeypatch):
    plain = generate(f"{HI} --num_samples 2")
    monkeypatch.setattr(write, "training_text", lambda run, tokenizer: np.zeros(0, np.uint16))
    monkeypatch.setattr(write.Copied, "mark", lambda copied, text: f"<{text}>{copied.least}")
    out = generate(f"{HI} --num_samples 2 --show_copied --copied_tokens 5")
    assert out.count("Hi<") == out.count(">5\n") == 2
    assert out.replace("Hi<", "Hi").replace(">5\n", "\n") == plain


TYPED = {r"\n": "\n", r"\t": "\t", "#": "#", "~": "~", "]": "]"}


@pytest.mark.parametrize(("typed", "meant"), TYPED.items())
def test_a_text_ends_before_the_stop_string_that_was_typed(typed, meant, generate):
    how = "--prompt Hi --seed 3 --temperature 1 --top_k null --max_new_tokens 1000"
    whole = generate(how)
    assert meant in whole[:-1]
    assert generate(f"{how} --stop never --stop {typed}") == f"{whole.partition(meant)[0]}\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("marks", [False, True])
def test_a_model_cannot_write_to_the_clipboard_of_a_terminal(marks, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("NO_COLOR", "1")  # the prompt's colour is ours
    pieces = iter([(0, "\x1b]52;c;"), (0, "aGk=\x07\n")])
    write._show("P", pieces, 1, (lambda text: f"[[{text}]]") if marks else None)
    assert terminal.getvalue().strip("[]P\n") == "\\x1b]52;c;aGk=\\x07"
