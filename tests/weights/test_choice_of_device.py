import pytest
import torch

from gpt.weights.load import choose_device


def test_auto_takes_the_device_that_fit_takes(monkeypatch):
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert choose_device().type == expected
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize("command", ["evaluate --data text.txt", "attention --text a", "generate", "serve"])
def test_each_command_has_the_option(command, model, workplace, monkeypatch, refusal):
    model.save_pretrained("model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no device cuda here" in refusal(f"{command} --checkpoint model --device cuda")
