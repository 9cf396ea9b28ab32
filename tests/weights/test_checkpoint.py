"""Which checkpoint is the newest, whatever the clocks say, whether one is intact, and its model's name."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rewritten import retold

from gpt.errors import InputError
from gpt.weights.checkpoint import LaterFormat, ModelPart, RunPart, parts_of, read, read_model
from gpt.weights.checkpoint import write as write_checkpoint
from gpt.weights.load import find
from gpt.weights.runs import checkpoints_of, model_name, most_crowded, newest_run, next_session

MODEL = ModelPart(config={}, tokenizer=None, template=None, adapters=None)


@pytest.fixture
def save(workplace):
    """Writes a checkpoint's header; the first ones have the newest times, and files all the same."""
    clock = iter(range(1000, 0, -1))

    def write(name: str, **order: int) -> Path:
        path = Path("runs") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        run = RunPart(**{"saved_at": float(next(clock)), "step": 1, "total": 1} | order)
        with path.open("wb") as file:
            write_checkpoint(file, {"w": torch.zeros(1)}, MODEL, run)
        os.utime(path, (0, 0))
        return path

    return write


def test_a_later_save_is_newer_and_a_later_session_newer_still(save):
    old = save("a/checkpoints/step-900.safetensors", session=1, save=9)
    resumed = save("a/checkpoints/step-50.safetensors", session=2, save=1)
    last = save("a/checkpoints/last.safetensors", session=2, save=2)
    assert checkpoints_of(Path("runs/a")) == [last, resumed, old]


def test_the_newest_run_is_the_one_that_saved_last(save, capsys):
    assert newest_run() is None
    save("b/checkpoints/last.safetensors", session=2, save=70, saved_at=5.0)
    save("a/checkpoints/last.safetensors", session=3, save=1, saved_at=6.0)
    assert newest_run() == Path("runs/a")
    assert find() == Path("runs/a/checkpoints/last.safetensors")
    assert "taking the newest run, runs/a" in capsys.readouterr().err
    assert next_session(Path("runs/a")) == 4
    assert next_session(Path("elsewhere")) == 1  # whatever stands in other runs


def test_a_broken_file_is_listed_first_but_makes_no_run_the_newest(save):
    save("a/checkpoints/last.safetensors", saved_at=9.0)
    intact = save("b/checkpoints/step-1.safetensors", saved_at=8.0)
    broken = Path("runs/b/checkpoints/last.safetensors")
    broken.write_bytes(b"PK half of a file")
    assert checkpoints_of(Path("runs/b")) == [broken, intact]
    assert checkpoints_of(Path("runs/b"), broken_first=False) == [intact, broken]
    assert newest_run() == Path("runs/a")


WEIGHT = "final_norm.weight"
MOMENT = "optimizer/final_norm.weight/exp_avg"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    path = tmp_path / "last.safetensors"
    tensors = {WEIGHT: torch.full((4,), 1.5), MOMENT: torch.full((4,), 2.5)}
    with path.open("wb") as file:
        write_checkpoint(file, tensors, MODEL, RunPart(step=1, total=1))
    return path


def damage(path: Path, value: float) -> None:
    """Change a byte of the tensor that has this value."""
    data = path.read_bytes()
    stored = torch.full((4,), value).numpy().tobytes()
    assert data.count(stored) == 1
    path.write_bytes(data.replace(stored, stored[:-1] + b"A"))


def test_a_damaged_weight_is_refused_and_a_moment_only_where_a_run_would_continue_with_it(checkpoint):
    damage(checkpoint, 2.5)
    model = read_model(checkpoint)
    assert model.tensors.keys() == {WEIGHT} and model.run is None
    assert model.weights[WEIGHT].tolist() == [1.5] * 4
    with pytest.raises(InputError, match="damaged: its contents are not those of its checksum"):
        read(checkpoint)
    damage(checkpoint, 1.5)
    with pytest.raises(InputError, match="damaged: its contents are not those of its checksum"):
        read_model(checkpoint)


def edit_header(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Change the texts in the header, and leave the checksum as it is."""
    written = path.read_bytes()
    end = 8 + int.from_bytes(written[:8], "little")
    header = json.loads(written[8:end])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + written[end:])


@pytest.mark.parametrize("sums", ["[0,0]", "[]", "{"])
def test_other_sums_in_the_header_are_refused(checkpoint, sums):
    edit_header(checkpoint, lambda texts: texts.update(sums=sums))
    with pytest.raises(InputError, match="is damaged"):
        read_model(checkpoint)


def test_a_file_without_sums_as_earlier_versions_wrote_it_is_checked_as_a_whole(checkpoint):
    edit_header(checkpoint, lambda texts: texts.pop("sums"))
    assert read(checkpoint).tensors.keys() == {WEIGHT, MOMENT}
    assert read_model(checkpoint).tensors.keys() == {WEIGHT}
    damage(checkpoint, 2.5)
    with pytest.raises(InputError, match="damaged"):
        read_model(checkpoint)


def test_a_flipped_byte_of_the_header_is_an_input_error_or_changes_nothing_else(checkpoint):
    """Also where nothing but the header is read, and no checksum is compared."""
    data = checkpoint.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    for place in range(end):
        flipped = bytearray(data)
        flipped[place] ^= 1
        checkpoint.write_bytes(flipped)
        for reader in (parts_of, read, read_model):
            try:
                reader(checkpoint)
            except InputError as error:
                assert str(checkpoint) in str(error), place


SNAPSHOT = "runs/v1.5/snapshots/step-1.safetensors"
NAMES = {
    "a run": ("runs/v1.5", "runs/v1.5/checkpoints/best.safetensors", "v1.5"),
    "a snapshot": (SNAPSHOT, SNAPSHOT, "v1.5"),
    "a folder": ("exported-v1.5", "exported-v1.5", "exported-v1.5"),
    "a file that was moved": ("moved.safetensors", "moved.safetensors", "moved"),
    "none, so the newest run": (None, "runs/v1.5/checkpoints/last.safetensors", "v1.5"),
    "a name at the hub": ("gpt2", "hub/models--gpt2/snapshots/607a30d", "gpt2"),
}


@pytest.mark.parametrize(("given", "path", "name"), NAMES.values(), ids=NAMES)
def test_a_model_has_the_name_of_its_run_or_folder_or_of_the_hub(given, path, name, workplace):
    for folder in ("runs/v1.5/checkpoints", "runs/v1.5/snapshots", "exported-v1.5"):
        Path(folder).mkdir(parents=True)
    for file in (SNAPSHOT, "moved.safetensors"):
        Path(file).touch()
    assert model_name(given, Path(path)) == name


def test_a_version_of_thousands_of_digits_is_a_later_one(save):
    """Python converts no text of more than 4,300 digits."""
    path = save("a/checkpoints/last.safetensors")
    retold(path, path, "", "", version="9" * 5000)
    for reader in (parts_of, read, read_model):
        with pytest.raises(LaterFormat, match=r"in its format 9{20}; this one reads those up to"):
            reader(path)


def test_a_snapshot_of_step_0_is_as_good_as_one_of_step_1():
    """No run writes it, but a stranger's may have it."""
    snapshots = [(step, 1.0, Path(f"step-{step}")) for step in (0, 5, 6, 100)]
    assert most_crowded(snapshots) == 1
    assert most_crowded([(1, 1.0, Path("step-1")), *snapshots[1:]]) == 1
