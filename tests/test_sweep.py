"""scripts/scaling/sweep.py: what a cell records of its training, and that it resumes."""

import csv

import pytest
from scaling import sweep

TEXT = "".join(f"{number} green bottles, hanging on the wall.\n" for number in range(600))


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measures cells, and returns all rows of the table."""
    table = tmp_path / "sweep.csv"
    names = [field.name for field in sweep.fields(sweep.Cell)]
    table.write_text(",".join([*names, *sweep.RESULTS]) + "\n", encoding="utf-8")
    monkeypatch.setattr(sweep, "TABLE", table)
    monkeypatch.setattr(sweep, "HELD_OUT", 4_000)
    monkeypatch.setattr(sweep, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(sweep, "kinds", lambda _: {"bottles": TEXT})
    monkeypatch.setattr("sys.argv", ["sweep.py"])

    def measure(*cells):
        monkeypatch.setattr(sweep, "design", lambda: cells)
        sweep.main()
        with table.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    return measure


def test_a_cell_is_one_training_and_is_not_measured_again(measured, monkeypatch):
    shape = {"vocab_size": 260, "context_length": 16, "emb_dim": 32, "num_layers": 1, "batch_tokens": 64}
    short, long = (sweep.Cell(text="bottles", text_bytes=9_000, steps=steps, **shape) for steps in (2, 40))
    rows = measured(short, long)
    bits = [float(row["bits_per_byte"]) for row in rows]
    assert 8.5 > bits[0] > bits[1] > 0.5
    row = rows[1]
    assert float(row["train_bytes"]) == 9_000
    assert int(row["parameters"]) == 32 * (260 + 16 + 12 * 32 + 13 + 2)
    # 260 ids: 256 bytes, the end of a text, and the three pairs that occur most often.
    assert float(row["passes"]) == pytest.approx(40 * 64 * float(row["bytes_per_token"]) / 9_000, rel=1e-4)
    quarters = [float(value) for value in row["trial_bits_per_byte"].split()]
    assert len(quarters) == 4 and 0 < quarters[0] < quarters[3] < 8
    monkeypatch.setattr(sweep, "measure", None)  # would raise
    assert measured(short, long) == rows
