"""Checkpoints that are whole or not there."""

import errno
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny_runs import checkpoint, contents, fit, result

from gpt import GPT
from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.run import checkpoint as checkpoints
from gpt.run.checkpoint import Checkpoints, set_random_state
from gpt.run.folder import Claim
from gpt.training.module import LanguageModel
from gpt.weights.checkpoint import RunPart, read, write

if sys.platform != "win32":
    import resource


def test_the_newest_and_the_best_are_kept(workplace):
    assert fit("--checkpoint_every 3 --keep_checkpoints 3 --run kept") == 0
    names = {path.stem for path in Path("runs/kept/checkpoints").iterdir()}
    assert names == {"best", "last", "step-15", "step-18"}
    steps = {name: checkpoint("kept", name).run.step for name in ("last", "step-15", "step-18")}
    assert steps == {"last": 20, "step-15": 15, "step-18": 18}


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
@pytest.mark.parametrize("room", [0, 64, 5_000, 100_000])
def test_a_full_disk_leaves_the_old_checkpoint(room, mine):
    before = contents(mine)
    path = mine / "checkpoints" / "last.safetensors"
    saved = read(path)
    tensors = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError, match="File too large"), atomic_write(path, "wb") as file:
            write(file, tensors, saved.model, saved.run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(mine) == before


def test_a_run_says_that_the_disk_is_full(workplace, monkeypatch, capsys):
    def full(file, tensors, model, run, original=checkpoints.write):
        if run is not None and run.step >= 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(file, tensors, model, run)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write", full)
        assert fit("--checkpoint_every 4 --run full") == 2
    err = capsys.readouterr().err
    assert err.count("gpt fit: ") == 1
    assert "runs/full/checkpoints/last.safetensors: No space left on device" in err
    assert checkpoint("full").run.step == 8
    assert fit("--resume auto --run full --checkpoint_every 4") == 0
    assert fit("--run whole --checkpoint_every 4") == 0
    assert result("full") == result("whole")


@pytest.fixture
def clock(monkeypatch):
    """The clock of checkpoints, which a test moves by hand."""
    now = [0.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    return now


def test_a_run_saves_at_least_once_a_minute(clock, workplace, monkeypatch):
    """Each update takes twenty seconds: one is saved once sixty are over, and agreed on in the next."""
    made = []

    def step(self, *arguments, original=LanguageModel.configure_gradient_clipping, **options):
        clock[0] += 20.0
        return original(self, *arguments, **options)

    def noted(file, tensors, model, run, original=checkpoints.write):
        made.append(run.step)
        original(file, tensors, model, run)

    monkeypatch.setattr(LanguageModel, "configure_gradient_clipping", step)
    monkeypatch.setattr(checkpoints, "write", noted)
    never = "--trainer.val_check_interval 1000 --checkpoint_every 1000"
    assert fit(f"{never} --trainer.max_steps 10 --run r") == 0
    assert made == [4, 8, 10]


def test_a_resumed_run_saves_at_most_once_a_hundredth(clock, tmp_path):
    with Claim() as claim:
        files = Checkpoints(claim.take(tmp_path), 1, step=500)
        clock[0] = 60.0
        assert not files.is_late(RunPart(step=509, total=1000))
        assert files.is_late(RunPart(step=510, total=1000))


def test_a_further_process_than_the_run_had_has_numbers_of_its_own():
    """The first process of a checkpoint without random states draws what its seed gives."""
    drawn = []
    for rank in (1, 2, 1, 0):
        torch.manual_seed(9)
        set_random_state({}, 5, rank, torch.device("cpu"))
        drawn.append(torch.rand(3).tolist())
    torch.manual_seed(9)
    first, second, again, zero = drawn
    assert first == again != second
    assert zero == torch.rand(3).tolist() not in (first, second)


def test_a_checkpoint_is_tensors_and_json_for_any_program(two_steps):
    with safe_open(two_steps / "checkpoints" / "last.safetensors", framework="np") as file:
        texts = {name: json.loads(text) for name, text in file.metadata().items() if name in ("run", "model")}
        assert texts["run"]["step"] == texts["run"]["total"] == 2
        assert texts["run"]["options"]["model"]["config"]["emb_dim"] == 32
        assert texts["model"]["config"]["vocab_size"] == 300
        weights = GPT.from_pretrained(two_steps).state_dict()
        assert {name for name in file.keys() if "/" not in name} == set(weights) - {"head.weight"}  # noqa: SIM118
        assert {"optimizer/blocks.0.feed_forward.up.weight/momentum_buffer", "random/0/cpu"} <= {*file.keys()}
        assert (file.get_tensor("final_norm.weight") == weights["final_norm.weight"].numpy()).all()


@pytest.mark.parametrize("part", ["header", "tensors"])
def test_every_flipped_byte_is_noticed(part, mine):
    path = mine / "checkpoints" / "last.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    places = range(8, end, 97) if part == "header" else range(end, len(data), 4999)
    copy = path.with_name("copy.safetensors")
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1
        copy.write_bytes(flipped)
        try:
            changed = read(copy)
        except InputError:
            continue
        assert changed.model == read(path).model and changed.run == read(path).run, place  # only the layout
