"""Readable checkpoints with values that no run saves: one line, status 2, and nothing is trained."""

from pathlib import Path

import pytest
import torch
import yaml
from tiny_runs import fit

from gpt import GPT
from gpt.cli import main
from gpt.errors import InputError
from gpt.run.folder import folder_of
from gpt.weights.checkpoint import read


@pytest.fixture
def saved(workplace):
    """A checkpoint of a short run, of which `change` writes a copy with other values."""
    assert fit("--trainer.max_steps", "2", "--run", "mine") == 0
    return read("runs/mine/checkpoints/last.ckpt")


def change(saved, **values) -> str:
    path = Path("runs/mine/checkpoints/evil.ckpt")  # `saved` is memory-mapped: its file must not change
    torch.save({**saved, **values}, path)
    return str(path)


def refused(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err.splitlines()[-1]


def test_values_that_no_run_saves(saved, capsys):
    for step in (-5, torch.zeros(3), "2"):
        assert "global_step" in refused(capsys, "fit", "--resume", change(saved, global_step=step))
    weights = {**saved["state_dict"], "model.token_embedding.weight": torch.zeros(1)}
    path = change(saved, state_dict=weights)
    assert "has shape (1,)" in refused(capsys, "fit", "--resume", path, "--trainer.max_steps", "3")
    options = yaml.safe_load(saved["run"]["options"])
    options["trainer"]["max_time"] = "evil.yaml"
    path = change(saved, run={**saved["run"], "options": yaml.safe_dump(options)})
    assert "evil.yaml" in refused(capsys, "validate", "--ckpt_path", path)
    config = {**saved["gpt"]["config"], "num_heads": 10**9, "emb_dim": 10**9}
    path = change(saved, gpt={**saved["gpt"], "config": config})
    refused(capsys, "generate", "--checkpoint", path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_device_is_not_read():
    with pytest.raises(InputError, match="neither a file nor a folder"):
        GPT.from_pretrained("/dev/zero")


def test_a_run_cannot_be_named_by_control_characters():
    with pytest.raises(InputError, match="plain folder name"):
        folder_of("\x1b[2J")


@pytest.mark.parametrize(
    "config",
    [{"emb_dim": 10**9}, {"num_heads": 1}, {"emb_dim": "1e9"}, {"num_layers": [1]}, {"x": 1}, [], 7],
    ids=str,
)
def test_settings_that_are_not_those_of_the_options(config, saved, capsys):
    """The options of the run decide the model, and the settings beside the weights must be the same."""
    settings = {**saved["gpt"]["config"], **config} if isinstance(config, dict) else config
    path = change(saved, gpt={**saved["gpt"], "config": settings})
    for command in (["validate", "--ckpt_path"], ["fit", "--resume"]):  # the latter has no step left
        capsys.readouterr()
        assert main([*command, path]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "evil.ckpt" in error
