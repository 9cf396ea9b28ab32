"""The diagrams in docs/ are those of `scripts/diagrams.py`, and name files that exist."""

from pathlib import Path

import diagrams
import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted({file for step in (*diagrams.TOWER, *sum(diagrams.ROWS, ())) for file in step[1:] if file})


@pytest.mark.parametrize("file", FILES)
def test_each_file_exists(file):
    assert (ROOT / file).is_file()


@pytest.mark.parametrize("name", diagrams.PICTURES)
def test_the_pictures_of_the_documents_are_drawn_by_the_script(name):
    drawn = (ROOT / "docs" / name).read_text("utf-8")
    assert drawn == diagrams.PICTURES[name](), "run: python scripts/diagrams.py"
