"""The name of a model: that of its run or folder, or the name by which it was asked for at the hub."""

from pathlib import Path

import pytest

from gpt.weights.runs import model_name

NAMES = {
    "a run": ("runs/v1.5", "runs/v1.5/checkpoints/best.safetensors", "v1.5"),
    "a snapshot": (
        "runs/v1.5/snapshots/step-1.safetensors",
        "runs/v1.5/snapshots/step-1.safetensors",
        "v1.5",
    ),
    "a folder": ("exported-v1.5", "exported-v1.5", "exported-v1.5"),
    "a file that was moved": ("moved.safetensors", "moved.safetensors", "moved"),
    "none, so the newest run": (None, "runs/v1.5/checkpoints/last.safetensors", "v1.5"),
    "a name at the hub": ("gpt2", "hub/models--gpt2/snapshots/607a30d", "gpt2"),
}


@pytest.mark.parametrize(("given", "path", "name"), NAMES.values(), ids=NAMES)
def test_a_model_has_the_name_of_its_run_or_folder(given, path, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/v1.5/checkpoints", "runs/v1.5/snapshots", "exported-v1.5"):
        Path(folder).mkdir(parents=True)
    for file in ("runs/v1.5/snapshots/step-1.safetensors", "moved.safetensors"):
        Path(file).touch()
    assert model_name(given, Path(path)) == name
