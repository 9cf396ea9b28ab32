"""Runs do not meet: a folder has one owner, and what is no run's is left as it is."""

import os
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock
from processes import forked
from tiny_runs import COMMAND, checkpoint, contents, gpt, result


def test_a_run_that_is_in_use_is_not_resumed(mine, refusal):
    before = contents(mine)
    with FileLock("runs/mine/.lock"):
        for how in ("runs/mine", "auto_or_new --run mine"):
            err = refusal(f"fit --resume {how} --trainer.max_steps 3")
            assert "runs/mine is in use by another process" in err
    assert contents(mine) == before


@pytest.mark.parametrize(
    ("folder", "place"),
    [
        ("runs/mine/checkpoints", "last.safetensors"),
        ("runs/mine/checkpoints", "../checkpoints/last.safetensors"),
        ("runs/mine", "checkpoints/last.safetensors"),
        ("runs/mine", "."),
    ],
)
def test_a_checkpoint_that_is_named_from_inside_its_run_belongs_to_it(
    folder, place, mine, workplace, monkeypatch, refusal
):
    monkeypatch.chdir(folder)
    more = f"fit --resume {place} --run mine --trainer.max_steps 3 --data.corpus {workplace / 'text.txt'}"
    with FileLock(workplace / "runs/mine/.lock"):
        assert "is in use by another process" in refusal(more)
    assert gpt(more) == 0
    assert checkpoint(workplace / "runs/mine").run.step == 3
    assert not Path("runs").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_two_runs_of_a_name_started_together_get_two_folders(workplace):
    """Both wait for a file once they have begun, and then start."""
    wait = (
        "import pathlib, time\n"
        "pathlib.Path('ready-{}').touch()\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.001)\n"
    )
    command = f"{COMMAND} --trainer.max_steps 3 --run twin --model.optimizer.name adamw".split()
    with forked(command, code=wait.format(0)) as one, forked(command, code=wait.format(1)) as other:
        deadline = time.monotonic() + 120
        while len(list(Path().glob("ready-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        Path("go").touch()
        for process in (one, other):
            process.join(120)
        assert [one.exitcode, other.exitcode] == [0, 0]
    assert sorted(os.listdir("runs")) == ["twin", "twin-2"]
    assert result("twin")[:2] == result("twin-2")[:2]


def test_the_config_of_another_program_is_not_overwritten_nor_its_files_removed(mine):
    project = Path("project")
    (project / "checkpoints").mkdir(parents=True)
    (project / "config.yaml").write_text("theirs: 1\n", "utf-8")
    (project / ".x.tmp").write_text("theirs", "utf-8")
    (project / "checkpoints" / ".y.tmp").touch()
    before = contents(project)
    moved = (mine / "checkpoints/last.safetensors").rename("project/checkpoints/last.safetensors")
    assert gpt(f"fit --resume {moved} --trainer.max_steps 3 --run new") == 0
    assert contents(project) == {**before, moved: moved.read_bytes()}
    assert checkpoint("new").run.step == 3
