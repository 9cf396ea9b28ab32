"""The diagrams in docs/ are those of `scripts/diagrams.py`, and name files that exist."""

import diagrams
import pytest
from processes import ROOT


def test_each_file_that_is_named_exists():
    steps = (*diagrams.TOWER, *sum(diagrams.ROWS, ()))
    files = {file for step in steps for file in step[1:] if file}
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("name", diagrams.PICTURES)
def test_the_pictures_of_the_documents_are_drawn_by_the_script(name):
    drawn = (ROOT / "docs" / name).read_text("utf-8")
    assert drawn == diagrams.PICTURES[name](), "run: python scripts/diagrams.py"
