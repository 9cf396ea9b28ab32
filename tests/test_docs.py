"""The documentation names only files that exist, and the table of docs/design.md names what is in them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
PATH = re.compile(r"(?<![\w/.-])(?:gpt|scripts|tests|docs|configs|data|\.ci)/[\w./*-]*[\w*/]")
NAMED_FILE = re.compile(r"`([\w./-]+\.(?:py|md))`")
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def named_paths(document: str) -> set[str]:
    """Paths that the document gives from the root of the repository, and the targets of its links."""
    text = (ROOT / document).read_text(encoding="utf-8")
    folder = Path(document).parent
    links = {(folder / link).as_posix() for link in LINK.findall(text)}
    return {*PATH.findall(text), *NAMED_FILE.findall(text), *links}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document):
    assert [path for path in sorted(named_paths(document)) if not list(ROOT.glob(path))] == []


def rows_of_changes() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.split("| to change or add | open |")[1].split("\n\n")[0]
    return re.findall(r"^\| (.+?) \| (.+) \|$", table, re.M)[1:]  # without the line below the header


@pytest.mark.parametrize(("change", "files"), rows_of_changes())
def test_the_files_contain_the_names_beside_them(change, files):
    paths = PATH.findall(files)
    assert paths, f"{change}: no file named"
    found = [path for name in paths for path in ROOT.glob(name) if path.is_file()]
    text = "\n".join(path.read_text(encoding="utf-8") for path in found)
    for name in re.findall(r"`(\w+)`", files):
        assert re.search(rf"\b{name}\b", text), f"{change}: {name} is not in {', '.join(paths)}"
