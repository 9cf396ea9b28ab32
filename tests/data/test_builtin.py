"""The texts that come with Python."""

import re

import pytest

from gpt.data import builtin


@pytest.fixture(scope="module")
def documents():
    return builtin.texts("builtin:python-docs")


def test_python_docs_is_reference_prose(documents):
    assert 1.5e6 < sum(len(text.encode()) for text in documents) < 4e6
    assert len(documents) > 500
    everything = "\n\n".join(documents)
    assert "Assert statements are a convenient way" in everything  # from the reference
    assert "HTTP server classes." in everything  # from a docstring
    assert "import os\n" not in documents[0]


def test_no_paragraph_of_python_docs_stands_twice(documents):
    parts = [" ".join(part.split()) for text in documents for part in re.split(r"\n[ \t]*\n", text)]
    long = [part for part in parts if len(part) >= 40]
    assert len(long) == len(set(long))


def test_tests_are_left_out():
    files = builtin._source_files()
    assert len(files) > 400
    assert not [path for path in files if {"test", "tests", "site-packages"} & set(path.parts[:-1][-4:])]


SOURCE = '''
"""One."""
names = [lambda: "no docstring", "nor this"]
if names:
    class A:
        """Two."""
        async def run(self):
            """Three."""
try:
    def f(): "Four."
except OSError:
    def f(): "Five."
else:
    while names:
        def g(): "Six."
finally:
    with open("x"):
        def h(): "Seven."
match names:
    case _:
        def i(): "Eight."
'''


def test_docstrings_stand_in_the_order_of_the_source(tmp_path):
    """Also of what is defined under a condition; other strings are none."""
    path = tmp_path / "module.py"
    path.write_text(SOURCE, "utf-8")
    expected = ["One.", "Two.", "Three.", "Four.", "Five.", "Six.", "Seven.", "Eight."]
    assert builtin._docstrings(path).split("\n\n") == expected
    path.write_text("def (", "utf-8")
    assert builtin._docstrings(path) == ""


def test_repeats_are_dropped_and_short_paragraphs_kept():
    seen = set()
    long = "A paragraph that is longer than forty characters, surely."
    text = f"{long}\n\nReturns:\n\n    indented"
    assert builtin._without_repeats(text, seen) == text
    respaced = long.replace(" ", "\n ")
    assert builtin._without_repeats(f"New.\n \n{respaced}\n\nReturns:", seen) == "New.\n\nReturns:"
