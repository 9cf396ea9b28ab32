import pytest
import torch

from gpt.cli import main
from gpt.weights.load import choose_device


def test_auto_takes_the_device_that_fit_takes(monkeypatch):
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert choose_device().type == expected
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize("command", ["evaluate", "attention", "generate", "serve"])
def test_each_command_has_the_option(command, model, text_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    more = {
        "evaluate": ["--data", str(text_file)],
        "attention": ["--text", "a"],
    }
    assert main([command, "--checkpoint", "model", "--device", "cuda", *more.get(command, [])]) == 2
    assert "no device cuda here" in capsys.readouterr().err
