"""What a stranger or a file system puts in the way of a run: nothing changes elsewhere, nothing is lost."""

import errno
import os
import sys
from pathlib import Path

import pytest
import torch
from rewritten import rewritten
from tiny_runs import TINY, fit, rows

import gpt.run.start
import gpt.weights.checkpoint
from gpt.cli import main
from gpt.errors import InputError
from gpt.files import Folder, atomic_write
from gpt.run.checkpoint import Checkpoints
from gpt.run.folder import Claim
from gpt.weights.checkpoint import order_of, read

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links, signals and flock")
LAST = Path("runs/mine/checkpoints/last.safetensors")
RESUME = ["fit", "--resume", "runs/mine", "--trainer.max_steps", "4", "--trainer.accelerator", "cpu"]
FILES = ["samples.txt", "metrics.csv", "config.yaml", "summary.json", ".lock", "checkpoints/best.safetensors"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_link_in_the_place_of_a_file_changes_nothing_elsewhere(name, hard, mine, capsys):
    victim = Path("victim")
    victim.write_bytes((mine / name).read_bytes() + b"and more\n" * 1000)
    before = victim.read_bytes()
    (mine / name).unlink()
    if hard:
        os.link(victim, mine / name)
    else:
        (mine / name).symlink_to(victim.resolve())
    status = main(RESUME)
    err = capsys.readouterr().err
    assert victim.read_bytes() == before
    assert status == 0 or (status == 2 and "is a link or no file" in err), err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["checkpoints", "snapshots"])
def test_a_link_in_the_place_of_a_folder_is_one_line(name, mine, capsys):
    (mine / name).rename("elsewhere")
    (mine / name).symlink_to(Path("elsewhere").resolve())
    before = contents(Path("elsewhere"))
    assert main(RESUME) == 2
    assert f"runs/mine/{name} is a link or a file, expected a folder" in capsys.readouterr().err
    assert contents(Path("elsewhere")) == before


def test_a_folder_of_snapshots_that_leads_elsewhere_loses_none_there(mine):
    """Those of later steps, which a resume from an earlier checkpoint removes in its own folder."""
    Path("theirs").mkdir()
    Path("theirs/step-9-loss-1.0000.safetensors").write_bytes(b"theirs")
    (mine / "snapshots").rename("own")
    (mine / "snapshots").symlink_to(Path("theirs").resolve())
    main(RESUME)
    assert Path("theirs/step-9-loss-1.0000.safetensors").read_bytes() == b"theirs"


def test_a_run_is_locked_before_its_checkpoint_is_read(mine, monkeypatch, capsys):
    """Another process resumes it and ends between the two."""
    statuses = []

    def meanwhile(*names, find=gpt.run.start.find):
        found = find(*names)
        if not statuses:
            statuses.append(None)
            statuses[0] = main([*RESUME, "--trainer.max_steps", "9"])
        return found

    monkeypatch.setattr(gpt.run.start, "find", meanwhile)
    assert main([*RESUME, "--trainer.max_steps", "3"]) == 0
    assert statuses == [2] and "is in use by another process" in capsys.readouterr().err
    assert read(LAST).run.step == 3
    assert [row["step"] for row in rows("mine") if row["train_loss"]][-1] == "3"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_without_locks_a_save_sees_what_another_process_has_written(number, mine, monkeypatch, capsys):
    import fcntl

    def no_locks(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    one, other = read(LAST), read(LAST)
    with Claim() as first, Claim() as second:
        theirs = Checkpoints(first.take(mine), 2, one, one.run)
        ours = Checkpoints(second.take(mine), 2, other, other.run)
        other.run.step = 200
        ours.save(other.tensors, other.model, other.run)
        with pytest.raises(InputError, match="was written by another process"):
            theirs.save(one.tensors, one.model, one.run)
    assert read(LAST).run.step == 200
    assert "has no locks" in capsys.readouterr().err


def test_a_resume_from_an_earlier_checkpoint_first_writes_that_as_the_newest(mine, monkeypatch):
    """And the one that it leaves keeps a name, and its record."""
    assert main([*RESUME, "--checkpoint_every", "1"]) == 0
    left, record = order_of(LAST), Path("runs/mine/metrics.csv").read_bytes()
    earlier = read("runs/mine/checkpoints/step-3.safetensors")
    with Claim() as claim:
        Checkpoints(claim.take(mine), 2, earlier, earlier.run)  # and is killed
    assert read(LAST).run.step == 3 and order_of(LAST) > left
    aside = mine / "checkpoints" / "last-step-4.safetensors"
    assert order_of(aside) == left
    assert (mine / "checkpoints" / "last-step-4.metrics.csv").read_bytes() == record
    assert main([*RESUME, "--model.optimizer.lr", "0"]) == 0  # the other future
    assert rows("mine")[-1]["val_loss"] != record.decode().splitlines()[-1].split(",")[7]
    assert main(["fit", "--resume", str(aside), "--trainer.max_steps", "5"]) == 0
    assert Path("runs/mine/metrics.csv").read_bytes().startswith(record)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_whole(mine, monkeypatch):
    other = rewritten(LAST, "other.safetensors", run={"step": 7}, tensors={"final_norm.bias": torch.ones(32)})

    opened = []

    def replaced(name, framework, safe_open=gpt.weights.checkpoint.safe_open):
        opened.append(name)
        if len(opened) == 2:  # the header was read, the tensors were not
            os.replace(other, LAST)
        return safe_open(name, framework)

    monkeypatch.setattr(gpt.weights.checkpoint, "safe_open", replaced)
    assert read(LAST).run.step == 2
    assert read(LAST).run.step == 7


def test_where_a_run_computes_is_not_taken_from_its_checkpoint(mine, capsys):
    options = read(LAST).run.options
    where = {"devices": 500, "logger": "wandb", "accelerator": "cuda"}
    path = rewritten(LAST, LAST, run={"options": {**options, "trainer": {**options["trainer"], **where}}})
    assert (
        main(["fit", "--resume", str(path), "--trainer.max_steps", "3", "--trainer.accelerator", "cpu"]) == 0
    )
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
    assert main(RESUME) == 0
    for name in (
        "checkpoints/last.safetensors",
        "metrics.csv",
        "samples.txt",
        "config.yaml",
        "checkpoints",
        ".",
    ):
        assert (mine / name).stat().st_ino in flushed, name


def test_a_file_system_that_cannot_flush_folders_takes_a_run(workplace, monkeypatch):
    def fails(descriptor, fsync=os.fsync):
        if os.path.isdir(f"/dev/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    assert fit("--trainer.max_steps", "2", "--run", "r") == 0
    assert read("runs/r/checkpoints/last.safetensors").run.step == 2


def test_another_error_than_no_links_is_no_copy(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("a", encoding="utf-8")

    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", fails)
    with Folder(tmp_path) as folder, pytest.raises(OSError, match="Input/output"):
        folder.also_called("a", "b")
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["\udcff", "n" * 255], ids=["not UTF-8", "255 bytes"])
def test_a_run_may_have_any_name_that_a_folder_can_have(name, workplace, capsys):
    assert fit("--trainer.max_steps", "2", "--run", name) == 0
    assert (
        main(["fit", "--resume", f"runs/{name}", "--trainer.max_steps", "3", "--trainer.accelerator", "cpu"])
        == 0
    )
    assert read(f"runs/{name}/checkpoints/last.safetensors").run.step == 3


def test_a_file_may_have_the_longest_name_that_there_is(tmp_path):
    with atomic_write(tmp_path / ("n" * 255)) as file:
        file.write("x")
    assert (tmp_path / ("n" * 255)).read_text(encoding="utf-8") == "x"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="becomes another user, who may not write")
def test_a_folder_that_may_not_be_written_to_is_one_line(mine, monkeypatch, capsys):
    before = contents(mine)
    for path in (Path.cwd(), *Path.cwd().parents):
        if path != Path("/") and path.stat().st_uid == 0 and str(path).startswith("/tmp/"):
            path.chmod(0o755)
    os.seteuid(54321)
    try:
        assert main(RESUME) == 2
    finally:
        os.seteuid(0)
    err = capsys.readouterr().err
    assert "runs/mine" in err and "Permission denied" in err and err.count("\n") == 1
    assert contents(mine) == before


def test_the_rate_of_a_row_is_that_of_its_update(workplace, clock):
    rates = clock()
    assert main([*TINY, "--trainer.max_steps", "6", "--log_every", "1", "--run", "r"]) == 0
    written = [float(row["learning_rate"]) for row in rows("r") if row["train_loss"]]
    assert written == pytest.approx(rates)
