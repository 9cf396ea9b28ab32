"""The documentation names only files that exist, and the table of docs/design.md names what is in them."""

import re
from pathlib import Path

import pytest
from processes import ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *PAGES]
PATH = re.compile(r"(?<![\w/.-])(?:gpt|scripts|tests|docs|configs|data|\.ci)/[\w./*-]*[\w*/]")
NAMED_FILE = re.compile(r"`([\w./-]+\.(?:py|md))`")
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


def named_paths(document: str) -> set[str]:
    """Paths that the document gives from the root of the repository, and the targets of its links."""
    text = (ROOT / document).read_text("utf-8")
    folder = Path(document).parent
    links = {(folder / link).as_posix() for link in LINK.findall(text)}
    return {*PATH.findall(text), *NAMED_FILE.findall(text), *links}


def anchor(heading: str) -> str:
    """GitHub's name of a heading in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists_and_every_anchor_is_a_heading(document):
    assert [path for path in sorted(named_paths(document)) if not list(ROOT.glob(path))] == []
    text = (ROOT / document).read_text("utf-8")
    for name, target in re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", text):
        page = (ROOT / document).parent / name if name else ROOT / document
        headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
        assert target in map(anchor, headings), f"{name}#{target}"


def test_the_index_of_the_log_links_every_entry():
    index = (ROOT / "docs" / "log" / "index.md").read_text("utf-8")
    linked = set(LINK.findall(index))
    assert linked == {page.name for page in ROOT.glob("docs/log/*.md")} - {"index.md"}


def design_rows(header: str, pattern: str) -> list[tuple[str, str]]:
    """The rows below this header in docs/design.md, matched by the pattern."""
    text = (ROOT / "docs" / "design.md").read_text("utf-8")
    table = text.split(header)[1].split("\n\n")[0]
    return re.findall(pattern, table, re.M)[1:]  # without the line below the header


CHANGES = design_rows("| to change or add | open |", r"^\| (.+?) \| (.+) \|$")
FACTS = design_rows("| fact | owner | who gets it |", r"^\| (.+?) \| (.+?) \|.*\|$")


@pytest.mark.parametrize(("change", "files"), CHANGES)
def test_the_files_contain_the_names_beside_them(change, files):
    paths = PATH.findall(files)
    assert paths, f"{change}: no file named"
    found = [path for name in paths for path in ROOT.glob(name) if path.is_file()]
    text = "\n".join(path.read_text("utf-8") for path in found)
    for name in re.findall(r"`(\w+)`", files):
        assert re.search(rf"\b{name}\b", text), f"{change}: {name} is not in {', '.join(paths)}"


@pytest.mark.parametrize(("fact", "owner"), FACTS)
def test_the_owner_of_a_fact_is_in_the_file_beside_it(fact, owner):
    owners = re.findall(r"`([\w/]+\.py)`: `(\w+)`", owner)
    assert owners, f"{fact}: no owner named"
    for path, name in owners:
        defined = rf"^ *(def|class) {name}\b"
        assert re.search(defined, (ROOT / path).read_text("utf-8"), re.M), f"{fact}: {name}"


def promises() -> list[tuple[str, str]]:
    """The rows of docs/reliability.md that promise something: the promise, and its tests."""
    text = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    tables = [part.split("\n\n")[0] for part in text.split("| promise | test |\n| --- | --- |\n")[1:]]
    return [row for table in tables for row in re.findall(r"^\| (.+) \| (.*) \|$", table, re.M)]


def test_all_rows_of_promises_are_read():
    assert len(promises()) > 30


@pytest.mark.parametrize(("promise", "tests"), promises())
def test_the_tests_of_a_promise_exist(promise, tests):
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    assert len(named) == len(tests.split(", ")), f"{promise}: expected names of tests, got {tests}"
    for file, name in named:
        source = (ROOT / file).read_text("utf-8")
        assert re.search(rf"^(?:async )?def {name}\(", source, re.M), f"{promise}: no {name} in {file}"
