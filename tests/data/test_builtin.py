"""The texts that come with Python."""

import re
from collections import Counter

from corpora import write

from gpt.data import builtin


def test_python_docs_is_reference_prose_and_repeats_only_short_paragraphs():
    documents = builtin.texts("builtin:python-docs")
    assert 1.5e6 < sum(len(text.encode()) for text in documents) < 4e6
    assert len(documents) > 500
    everything = "\n\n".join(documents)
    assert "Assert statements are a convenient way" in everything  # from the reference
    assert "HTTP server classes." in everything  # from a docstring
    counts = Counter(" ".join(part.split()) for part in re.split(r"\n[ \t]*\n", everything))
    repeated = [part for part, count in counts.items() if count > 1]
    assert repeated and max(map(len, repeated)) < 40


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


def test_docstrings_stand_in_the_order_of_the_source(tmp_path, monkeypatch):
    """Also of what is defined under a condition; other strings are none, and tests are left out."""
    monkeypatch.setattr(builtin, "_LIBRARY", tmp_path)
    write(tmp_path / "module.py", SOURCE)
    write(tmp_path / "not_valid.py", "def (")
    write(tmp_path / "test" / "module.py", '"""A test."""')
    *_, last = builtin.python_docs()
    assert last.split("\n\n") == ["One.", "Two.", "Three.", "Four.", "Five.", "Six.", "Seven.", "Eight."]
