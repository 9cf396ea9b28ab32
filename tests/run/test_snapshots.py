"""Snapshots of a run: which steps, how many, and that they change nothing else."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import fit, gpt, killed, result, run_in

from gpt.files import Folder
from gpt.run import snapshots
from gpt.run.folder import Claim
from gpt.run.snapshots import Snapshots, thin
from gpt.weights.checkpoint import ModelPart, read
from gpt.weights.load import load
from gpt.weights.runs import snapshots_of

OPTIONS = "--checkpoint_every 1 --keep_checkpoints 100 --trainer.max_steps 21"
STEPS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 21]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return run_in(tmp_path_factory.mktemp("whole"), OPTIONS)


def steps_of(run: Path) -> list[int]:
    return [step for step, _, _ in snapshots_of(run)]


def test_a_snapshot_has_the_steps_weights_in_bfloat16_and_its_loss(whole):
    kept = snapshots_of(whole)
    assert steps_of(whole) == STEPS
    assert kept[0][1] > kept[-1][1] > 0
    for step, _, path in kept[:-1]:
        wanted = read(whole / "checkpoints" / f"step-{step}.safetensors").weights
        saved = read(path).weights
        assert "head.weight" not in saved  # the tied one
        for name, weight in saved.items():
            assert torch.equal(weight, wanted[name].bfloat16())
    model, tokenizer = load(kept[3][2])
    assert tokenizer.n_vocab == 300 and model.config.emb_dim == 32


def test_a_resumed_run_keeps_one_row(whole, workplace):
    """The snapshots after the checkpoint are removed, and made again."""
    run = killed(whole, 9)
    (run / "snapshots" / "step-18-loss-1.0000.safetensors").write_bytes(b"another future's")
    (run / "snapshots" / ".step-18.safetensors.x.tmp").write_bytes(b"half")
    assert gpt(f"fit --resume {run}") == 0
    assert sorted(os.listdir(run / "snapshots")) == sorted(os.listdir(whole / "snapshots"))
    assert result(run) == result(whole)


def test_the_closest_go_first(tmp_path):
    steps = [1, 2, 3, 4, 5, 6, 8, 12, 16, 1000]
    (tmp_path / "snapshots").mkdir()
    for step in steps:
        (tmp_path / "snapshots" / f"step-{step}-loss-1.0.safetensors").write_bytes(bytes(100))
    with Folder(tmp_path / "snapshots") as files:
        thin(files, snapshots_of(tmp_path), 650)
        assert steps_of(tmp_path) == [1, 2, 4, 8, 16, 1000]
        thin(files, snapshots_of(tmp_path), 0)
    assert steps_of(tmp_path) == [1, 1000]


def test_a_full_disk_costs_the_snapshot_and_not_the_run(workplace, monkeypatch):
    made = []

    def full(file, *parts, original=snapshots.write):
        made.append(file)
        if len(made) == 2:
            raise OSError(28, "No space left on device")
        original(file, *parts)

    monkeypatch.setattr(snapshots, "write", full)
    assert fit("--run full --trainer.max_steps 3") == 0
    assert steps_of(Path("runs/full")) == [1, 3]


def test_snapshots_that_would_not_fit_are_not_even_copied(tmp_path):
    """The weights have no data here that could be copied."""
    with Claim() as claim:
        kept = Snapshots(claim.take(tmp_path), megabytes=1)
        weights = {"weight": torch.empty(1_000_000 // 16 + 1, device="meta")}
        kept.save(1, 1.0, weights, ModelPart(config={}, tokenizer=None, template=None, adapters=None))
    assert not (tmp_path / "snapshots").exists()


def test_a_snapshot_writes_and_is_not_resumed(whole, workplace, refusal):
    path = shutil.copy(snapshots_of(whole)[4][2], "snapshot.safetensors")
    for command in ("fit --resume", "validate"):
        err = refusal(f"{command} {path}")
        assert "can neither be resumed nor validated; gpt evaluate scores it" in err
    assert gpt(f"generate --checkpoint {path} --max_new_tokens 3") == 0
    Path("half.safetensors").write_bytes(Path(path).read_bytes()[:-300])
    refusal("generate --checkpoint half.safetensors")
