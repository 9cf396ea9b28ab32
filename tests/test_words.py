"""What `scripts/words.py` finds, which `make lint` runs on all documents and source."""

import pytest
import words


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.md", "A run.\n\nIt counts losses alone.\n", "a.md:3: 'alone', write only"),
        ("a.md", "A model. Of two runs, one is kept.\n", "a.md:1: 'Of'"),
        ("a.md", "| a | b |\n| --- | --- |\n| c | d alone |\n", "a.md:3: 'alone'"),
        ("a.md", "It takes 1, 2, 3, 4 or 5 s.\n", "a.md:1: 5 figures"),
        ("a.md", f"\n{'word ' * 21}\n", "a.md:2: 105 characters"),
        ("a.py", 'def f():\n    """Return a text.\n\n    It is read anew."""\n', "a.py:4: 'anew'"),
        ("a.py", 'x = 1\n# It is read\n# anew.\nprint("it is read anew")\n', "a.py:2: 'anew'"),
        ("a.yaml", "run: a\nx: 1  # read anew\n", "a.yaml:2: 'anew'"),
    ],
)
def test_what_is_found(name, text, found):
    findings = list(words.findings(name, text))
    assert any(line.startswith(found) for line in findings), findings


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.md", "```text\nalone, 1 2 3 4 5 6\n```\n\n    anew\n\nA `law` of 128 x 2 and 64 x 2, 1 or 2.\n"),
        ("a.md", f"| {'word ' * 30}|\n[here](https://{'a' * 120})\n"),
        ("a.py", 'alone = {"alone": 1}\n'),
    ],
)
def test_code_links_and_tables_are_left_out(name, text):
    assert list(words.findings(name, text)) == []
