"""Every table of measurements names its commit, date and code, and says that it is stale where it is."""

import ast
import re
import subprocess
from functools import cache

import pytest
from processes import ROOT

PAGES = sorted(ROOT.glob("docs/*.md"))
MEASURED = re.compile(r"\*([^*]+)\*\n\n<!-- measured: (\S+), ([\d-]{10}); code: (.+?) -->\n\n\|")
TABLES = [(page.name, *found) for page in PAGES for found in MEASURED.findall(page.read_text("utf-8"))]


def git(*words: str) -> str | None:
    """Return what git prints, or None where there is no git, no repository or no such commit."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, encoding="utf-8")
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def meaning(name: str, text: str) -> str:
    """Return what a file computes: a Python file without comments, docstrings, annotations and layout."""
    if not name.endswith(".py"):
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [line for line in body if not is_text(line)] or [ast.Pass()]
        for name in {"annotation", "returns"} & set(node._fields):
            setattr(node, name, None)
    return ast.dump(tree)


def is_text(line: ast.stmt) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


@cache
def has_changed(commit: str, path: str) -> bool:
    """Whether a file or folder computes something else than at the commit, or was moved."""
    names = (git("diff", "--name-only", "--no-renames", commit, "--", path) or "").split()
    return any(is_different(commit, name) for name in names)


def is_different(commit: str, name: str) -> bool:
    before = git("show", f"{commit}:{name}")
    file = ROOT / name
    if before is None or not file.exists():
        return True
    return meaning(name, before) != meaning(name, file.read_text("utf-8"))


def test_all_tables_of_benchmarks_are_read():
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    tables = len(re.findall(r"^\| ---", text, re.M))
    assert sum(page == "benchmarks.md" for page, *_ in TABLES) == tables == text.count("<!-- benchmark ") > 8


@pytest.mark.parametrize(("page", "caption", "commit", "date", "code"), TABLES)
def test_a_table_says_when_its_code_has_changed_since(page, caption, commit, date, code):
    assert commit in caption and date in caption, f"{page}: the caption {caption!r} lacks its commit or date"
    paths = code.split()
    assert [path for path in paths if not (ROOT / path).exists()] == []
    if git("cat-file", "-e", f"{commit}^{{commit}}") is None:
        pytest.skip("needs the repository's history")
    changed = [path for path in paths if has_changed(commit, path)]
    assert not changed or "Stale" in caption, f"{page}: {caption!r} is stale: {', '.join(changed)}"
