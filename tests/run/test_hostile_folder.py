"""What a stranger or a file system puts in the way of a run: nothing changes elsewhere, nothing is lost."""

import errno
import os
import sys
from pathlib import Path

import pytest
import torch
from rewritten import rewritten
from tiny_runs import checkpoint, contents, fit, gpt, rows

from gpt.errors import InputError
from gpt.files import Folder
from gpt.run import resumed
from gpt.run.checkpoint import Checkpoints
from gpt.run.folder import Claim
from gpt.weights import checkpoint as checkpoints
from gpt.weights.checkpoint import read
from gpt.weights.runs import order_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links, signals and flock")
LAST = Path("runs/mine/checkpoints/last.safetensors")
RESUME = "fit --resume runs/mine --trainer.accelerator cpu --trainer.max_steps"
FILES = ["samples.txt", "metrics.csv", "config.yaml", "summary.json", ".lock", "checkpoints/best.safetensors"]


@pytest.mark.parametrize("link", [os.link, os.symlink], ids=["hard", "symbolic"])
@pytest.mark.parametrize("name", FILES)
def test_a_link_in_the_place_of_a_file_changes_nothing_elsewhere(name, link, mine, capsys):
    victim = Path("victim").resolve()
    victim.write_bytes((mine / name).read_bytes() + b"and more\n" * 1000)
    before = victim.read_bytes()
    (mine / name).unlink()
    link(victim, mine / name)
    status = gpt(f"{RESUME} 4")
    err = capsys.readouterr().err
    assert victim.read_bytes() == before
    assert status == 0 or (status == 2 and "is a link or no file" in err), err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["checkpoints", "snapshots"])
def test_a_link_in_the_place_of_a_folder_is_one_line(name, mine, capsys):
    """Nothing in the other folder is removed, such as a snapshot of a later step."""
    (mine / name).rename("elsewhere")
    (mine / name).symlink_to(Path("elsewhere").resolve())
    Path("elsewhere/step-9-loss-1.0000.safetensors").write_bytes(b"theirs")
    before = contents(Path("elsewhere"))
    assert gpt(f"{RESUME} 4") == 2
    assert f"runs/mine/{name} is a link or a file, expected a folder" in capsys.readouterr().err
    assert contents(Path("elsewhere")) == before


def test_a_run_is_locked_before_its_checkpoint_is_read(mine, monkeypatch, capsys):
    """Another process resumes it and ends between the two."""
    statuses = []

    def meanwhile(path, read=resumed.read):
        checkpoint = read(path)
        if not statuses:
            statuses.append(None)
            statuses[0] = gpt(f"{RESUME} 9")
        return checkpoint

    monkeypatch.setattr(resumed, "read", meanwhile)
    assert gpt(f"{RESUME} 3") == 0
    assert statuses == [2] and "is in use by another process" in capsys.readouterr().err
    assert read(LAST).run.step == 3
    assert [row["step"] for row in rows("mine") if row["train_loss"]][-1] == "3"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS], ids=errno.errorcode.get)
def test_without_locks_a_save_sees_what_another_process_has_written(number, mine, monkeypatch, capsys):
    import fcntl

    def no_locks(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    ours, theirs = read(LAST), read(LAST)
    with Claim() as first, Claim() as second:
        our_files = Checkpoints(first.take(mine), 2, ours.run.step)
        our_files.take_over(ours, ours.run)
        their_files = Checkpoints(second.take(mine), 2, theirs.run.step)
        their_files.take_over(theirs, theirs.run)
        theirs.run.step = 200
        their_files.save(theirs.tensors, theirs.model, theirs.run)
        with pytest.raises(InputError, match="was written by another process"):
            our_files.save(ours.tensors, ours.model, ours.run)
    assert read(LAST).run.step == 200
    assert "has no locks" in capsys.readouterr().err


def test_a_resume_from_an_earlier_checkpoint_first_writes_that_as_the_newest(mine):
    """And the one that it leaves keeps a name, and its record."""
    assert gpt(f"{RESUME} 4 --checkpoint_every 1") == 0
    left, record = order_of(LAST), (mine / "metrics.csv").read_bytes()
    earlier = checkpoint("mine", "step-3")
    with Claim() as claim:
        Checkpoints(claim.take(mine), 2, earlier.run.step).take_over(earlier, earlier.run)  # and is killed
    assert read(LAST).run.step == 3 and order_of(LAST) > left
    aside = mine / "checkpoints" / "last-step-4.safetensors"
    assert order_of(aside) == left
    assert (mine / "checkpoints" / "last-step-4.metrics.csv").read_bytes() == record
    assert gpt(f"{RESUME} 4 --model.optimizer.lr 0") == 0  # the other future
    assert not (mine / "metrics.csv").read_bytes().startswith(record)
    assert gpt(f"fit --resume {aside} --trainer.max_steps 5") == 0
    assert (mine / "metrics.csv").read_bytes().startswith(record)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_whole(mine, monkeypatch):
    other = rewritten(LAST, "other.safetensors", run={"step": 7}, tensors={"final_norm.bias": torch.ones(32)})
    opened = []

    def replaced(name, framework, safe_open=checkpoints.safe_open):
        opened.append(name)
        if len(opened) == 2:  # the header was read, the tensors were not
            os.replace(other, LAST)
        return safe_open(name, framework)

    monkeypatch.setattr(checkpoints, "safe_open", replaced)
    assert read(LAST).run.step == 2
    assert read(LAST).run.step == 7


def test_where_a_run_computes_is_not_taken_from_its_checkpoint(mine, capsys):
    options = read(LAST).run.options
    options["trainer"] |= {"devices": 500, "logger": "wandb", "accelerator": "cuda"}
    rewritten(LAST, LAST, run={"options": options})
    assert gpt(f"{RESUME} 3") == 0
    assert "the run had 500 processes on a machine, and this start has 1" in capsys.readouterr().err
    assert not (mine / "wandb").exists()
    saved = read(LAST).run.options["trainer"]
    assert (saved["devices"], saved["logger"], saved["accelerator"]) == (1, "csv", "cpu")


def test_what_is_saved_is_on_the_disk_before_it_has_its_name(mine, monkeypatch):
    flushed = set()

    def noted(descriptor, fsync=os.fsync):
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    assert gpt(f"{RESUME} 4") == 0
    files = "checkpoints/last.safetensors metrics.csv samples.txt config.yaml checkpoints ."
    assert [name for name in files.split() if (mine / name).stat().st_ino not in flushed] == []


def test_a_file_system_that_cannot_flush_folders_takes_a_run(workplace, monkeypatch):
    def fails(descriptor, fsync=os.fsync):
        if os.path.isdir(f"/dev/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    assert fit("--trainer.max_steps 2 --run r") == 0
    assert checkpoint("r").run.step == 2


def test_another_error_than_no_links_is_no_copy(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("a", "utf-8")

    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", fails)
    with Folder(tmp_path) as folder, pytest.raises(OSError, match="Input/output"):
        folder.also_called("a", "b")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["\udcff", "n" * 255], ids=["not UTF-8", "255 bytes"])
def test_a_run_may_have_any_name_that_a_folder_can_have(name, workplace):
    assert fit(f"--trainer.max_steps 2 --run {name}") == 0
    assert gpt(f"fit --resume runs/{name} --trainer.max_steps 3") == 0
    assert checkpoint(name).run.step == 3
