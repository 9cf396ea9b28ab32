"""Checkpoints of other versions: the earlier ones resume, of later ones what is unknown is named.

older/format-1.safetensors was written by the version before there was a number of the format, after 8 updates
on older/text.txt, and format-1.csv beside it. Later formats get files beside these, which stay.
"""

import csv
import shutil
from pathlib import Path

import pytest
from rewritten import retold
from tiny_runs import gpt, rows

from gpt.run.record import COLUMNS
from gpt.weights.checkpoint import read

OLDER = Path(__file__).parent / "older"
LAST = Path("runs/old/checkpoints/last.safetensors")
RESUME = "fit --resume runs/old --trainer.accelerator cpu"


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """The run's folder as the earlier version left it, with rows that it had not saved yet."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(OLDER / "text.txt", "text.txt")
    LAST.parent.mkdir(parents=True)
    shutil.copy(OLDER / "format-1.safetensors", LAST)
    table = (OLDER / "format-1.csv").read_text("utf-8")
    Path("runs/old/metrics.csv").write_text(f"{table}10,640,0.2,5.5,,,,,,,\n12,7", "utf-8")
    Path("runs/old/config.yaml").write_text("run: old\ncheckpoint_every: 4\n", "utf-8")
    return Path("runs/old")


def test_a_run_of_an_earlier_version_resumes_and_keeps_its_record(old, capsys):
    assert gpt(f"{RESUME} --trainer.max_steps 12") == 0
    err = capsys.readouterr().err
    assert "after step 8" in err and "does not know" not in err
    saved = read(LAST)
    assert saved.run.step == 12 and saved.run.place == 96
    assert [row["step"] for row in rows("old")] == ["2", "4", "4", "6", "8", "8", "10", "12", "12"]
    assert gpt(f"generate --checkpoint {OLDER / 'format-1.safetensors'} --max_new_tokens 2") == 0


def test_fields_of_a_later_version_are_named_and_ignored(old, capsys):
    LAST.unlink()
    retold(OLDER / "format-1.safetensors", LAST, '"place":64', '"place":64,"mood":[1]')
    retold(LAST, LAST, '"log_every":2', '"log_every":2,"sing":true')
    assert gpt(f"{RESUME} --trainer.max_steps 9") == 0
    told = "ignored what a later version has saved and this one does not know: mood, sing"
    assert told in capsys.readouterr().err
    assert read(LAST).run.step == 9


@pytest.mark.parametrize("command", ["fit --resume", "generate --checkpoint"])
def test_a_later_format_is_refused_with_its_number(command, old, refusal):
    retold(LAST, LAST, "", "", version="3")
    told = "was written by a later version of this program, in its format 3"
    assert told in refusal(f"{command} {LAST}")


@pytest.mark.parametrize("resumed", ["", "checkpoints/step-8.safetensors"])
def test_an_earlier_checkpoint_does_not_take_the_place_of_a_later_formats(resumed, old, capsys):
    """It is not broken, so no other is resumed in its place, and it keeps its name."""
    shutil.copy(LAST, LAST.with_name("step-8.safetensors"))
    retold(LAST, LAST, "", "", version="3")
    before = LAST.read_bytes()
    assert gpt(f"fit --resume {old / resumed} --trainer.accelerator cpu --trainer.max_steps 12") == 2
    assert "in its format 3; this one reads those up to 2: update it" in capsys.readouterr().err
    assert LAST.read_bytes() == before
    assert not list(LAST.parent.glob("*.broken"))


def test_a_table_with_other_columns_gets_those_of_today_and_keeps_its_own(old):
    """The columns of another version: one that is not known here, and none for the gradient's norm."""
    table = Path("runs/old/metrics.csv")
    with table.open(encoding="utf-8", newline="") as file:
        before = list(csv.DictReader(file))[:6]
    names = ["step", "mood", *(name for name in before[0] if name not in ("step", "gradient_norm"))]
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, restval="fine", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(before)
    assert gpt(f"{RESUME} --trainer.max_steps 9 --log_every 1") == 0
    after = rows("old")
    assert tuple(after[0]) == (*COLUMNS, "mood")
    assert [row["mood"] for row in after] == ["fine"] * 6 + [""] * 2
    assert [row["train_loss"] for row in after[:6]] == [row["train_loss"] for row in before]
    assert not after[0]["gradient_norm"] and float(after[6]["gradient_norm"]) > 0
