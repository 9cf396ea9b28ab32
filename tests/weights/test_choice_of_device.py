import pytest
import torch

from gpt.cli import main
from gpt.errors import InputError
from gpt.weights.load import choose_device


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_auto_takes_the_device_that_fit_takes(cuda, mps, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert choose_device().type == expected
    assert choose_device("cpu").type == "cpu"


def test_a_missing_device_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(InputError, match="no device cuda here, expected auto or one of mps, cpu"):
        choose_device("cuda")


@pytest.mark.parametrize("command", ["evaluate", "attention", "probabilities", "generate", "serve"])
def test_each_command_has_the_option(command, model, text_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    more = {
        "evaluate": ["--data", str(text_file)],
        "attention": ["--text", "a"],
        "probabilities": ["--text", "a"],
    }
    assert main([command, "--checkpoint", "model", "--device", "cuda", *more.get(command, [])]) == 2
    assert "no device cuda here" in capsys.readouterr().err
