"""Two corpora that come with every Python: the standard library's documentation, and its source.

`python-docs` has one document for each topic of `help()` and one for the docstrings of each module. It keeps
only the first copy of a paragraph, so that no paragraph is both trained on and held out. Tests are left out.
The text belongs to the Python Software Foundation (PSF licence) and differs between versions.
"""

import ast
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
_SHORTEST_PARAGRAPH = 40  # characters; shorter ones, like "Returns:", may repeat


def python_docs() -> Iterator[str]:
    """Yield the documents of `python-docs`: first the topics of `help()`, then the modules, by name."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    of_topics = [topics[name] for name in sorted(topics)]
    of_modules = [_docstrings(path) for path in _source_files()]
    for text in of_topics + of_modules:
        if document := _without_repeats(text, seen):
            yield document


def python_stdlib() -> Iterator[str]:
    """Yield the documents of `python-stdlib`: the library's source files."""
    for path in _source_files():
        if text := path.read_bytes().decode("utf-8", errors="replace"):
            yield text


_CORPORA = {"builtin:python-docs": python_docs, "builtin:python-stdlib": python_stdlib}
NAMES = tuple(_CORPORA)


@cache
def texts(name: str) -> list[str]:
    """Return the documents of a built-in corpus, by its name in a corpus file (`builtin:...`)."""
    return list(_CORPORA[name]())


def _source_files() -> list[Path]:
    paths = sorted(_LIBRARY.rglob("*.py"))
    return [path for path in paths if not _NOT_THE_LIBRARY.intersection(path.relative_to(_LIBRARY).parts)]


def _docstrings(path: Path) -> str:
    """Return the docstrings of a module, its classes and functions, in the order of the source."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # a few library files are invalid on purpose
        return ""
    return "\n\n".join(text for text in _inside(tree) if text)


def _inside(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a node and of the statements inside it, in the order of the source."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node) or ""
    for statements in ("body", "cases", "handlers", "orelse", "finalbody"):
        for inner in getattr(node, statements, ()):
            yield from _inside(inner)


def _without_repeats(text: str, seen: set[str]) -> str:
    """Remove the paragraphs of `text` that are in `seen`, and add the others to `seen`."""
    kept = []
    for paragraph in re.split(r"\n(?:[ \t]*\n)+", text):
        words = " ".join(paragraph.split())
        if len(words) >= _SHORTEST_PARAGRAPH:
            if words in seen:
                continue
            seen.add(words)
        if words:
            kept.append(paragraph.rstrip())
    return "\n\n".join(kept).strip("\n")
