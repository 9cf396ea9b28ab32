import pytest
import torch
from tiny_runs import gpt

from gpt.run.listing import read_runs, table
from gpt.weights.checkpoint import ModelPart, RunPart, write

MODEL = ModelPart(config={}, tokenizer=None, template=None, adapters=None)


@pytest.fixture
def save(tmp_path):
    """Writes a checkpoint of a run."""

    def save(run: str, name: str, **numbers) -> None:
        path = tmp_path / "runs" / run / "checkpoints" / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {"data": {"corpus": "texts/my.txt"}}
        with open(path, "wb") as file:
            write(file, {"weight": torch.zeros(2)}, MODEL, RunPart(options=options, **numbers))

    return save


def test_runs_are_listed_by_their_newest_checkpoint(save, workplace, capsys):
    bits = {"val_bits_per_byte": 1.6, "val_loss": 3.2}  # at the last validation
    done = {"step": 20, "total": 20, "seconds": 90.0, "validation": bits, "best_loss": 3.0}
    save("old", "last", session=1, save=2, saved_at=86400.0, **done)
    save("old", "best", session=1, save=1, step=10, total=20, seconds=45.0, saved_at=90000.0)
    save("new", "last", session=1, save=1, step=5, total=40, seconds=6.0, saved_at=200000.0)
    (workplace / "runs" / "empty").mkdir()
    assert gpt("runs") == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split("  ")[0] == "run" and "bits per byte" in heading
    new, old = (line.split() for line in lines)
    assert new[:6] == ["new", "my.txt", "5", "of", "40", "0.1"]
    assert old[:5] == ["old", "my.txt", "1.500", "20", "1.5"]
    assert len({len(line) for line in [heading, *lines]}) == 1  # aligned


def test_a_total_that_is_not_known_yet_is_not_listed(save, tmp_path):
    save("a", "last", session=1, save=1, step=1, total=1 << 53)
    assert table(read_runs(tmp_path / "runs"))[1].split()[2:4] == ["1", "0.0"]


def test_a_broken_checkpoint_does_not_hide_the_run(save, tmp_path):
    save("a", "last", session=1, save=1, step=5, total=5)
    (tmp_path / "runs" / "a" / "checkpoints" / "step-9.safetensors").write_bytes(b"broken")
    assert [run.step for _, run in read_runs(tmp_path / "runs")] == [5]


def test_a_name_that_a_terminal_would_obey_is_not_printed_as_it_is(save, tmp_path):
    save("a\x1b]52;c;aGk=\x07", "last", session=1, save=1, step=5, total=5)
    text = "\n".join(table(read_runs(tmp_path / "runs")))
    assert "\x1b" not in text and "a\\x1b]52" in text


def test_no_run_is_one_line(workplace, refusal):
    assert "start one with 'gpt fit'" in refusal("runs")
