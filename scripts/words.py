"""Check that documents, docstrings, comments and messages are in plain English: `python scripts/words.py`.

It prints a line for each of the phrases below, for each line of a document that is too long, and for each
sentence of a document with too many figures. It exits with status 1 if it has printed one.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("configs", "data", "gpt", "scripts", "tests")
FILES = ("*.md", "Makefile", "docs/*.md", "docs/log/*.md", *(f"{folder}/**/*" for folder in FOLDERS))
OWN = ("scripts/words.py", "tests/test_words.py")  # they hold what others should not
LONGEST_LINE = 100
MOST_FIGURES = 4
PHRASES = {
    r"\balone\b": "only, or by itself",
    r"\bby heart\b": "memorised",
    r"\bin turns?\b(?! into)": "interleaved, or one after another",
    r"\bpasses over the (?:text|corpus|data)\b": "epochs",
    r"\bof today\b|\bany more\b|\b(?:is|are) gone since\b": "what is there now",
    r"(?<!scaling )\blaws?\b": "scaling law",
    r"\btrial runs?\b|\ba trial\b": "pilot run",
    r"\banew\b": "again",
    r"\bbut for\b": "except",
    r"\bword for word\b": "verbatim",
    r"\b(?:most|least|in) so many\b": "a name for the number, such as N",
    r"\btoo surely\b": "overconfident",
    r"^Of (?=[a-z\d])|^That (?!is\b|was\b|does\b|can\b)": "the subject at the beginning of the sentence",
}
"""What not to write, as a pattern, and what to write instead."""
FIGURE = re.compile(r"(?<![\w.,-])\d[\d.,]*(?![\w-])")
HIDDEN = re.compile(r"^```.*?^```|^    .*?$|<!--.*?-->", re.M | re.S)  # code and comments of a document
NAMED = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+|\b\d[\d,]* x \d[\d,]*")  # code, links, shapes
Passage = tuple[int, str]
"""The number of a line, and the text that begins there."""


def main() -> int:
    """Check all documents and all source."""
    paths = sorted({path for pattern in FILES for path in ROOT.glob(pattern)})
    names = [path.relative_to(ROOT).as_posix() for path in paths if path.is_file()]
    names = [name for name in names if Path(name).suffix in READERS and name not in OWN]
    found = [line for name in names for line in findings(name, (ROOT / name).read_text(encoding="utf-8"))]
    print("\n".join(found) if found else f"{len(names)} files are in plain English")
    return 1 if found else 0


def findings(name: str, text: str) -> Iterator[str]:
    """Yield a line for all that should be written in another way in a file of this name."""
    suffix = Path(name).suffix
    for number, passage in READERS[suffix](text):
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(NAMED.sub("X", passage).split())):
            for pattern, better in PHRASES.items():
                flags = 0 if pattern.startswith("^") else re.I
                if phrase := re.search(pattern, sentence, flags):
                    yield f"{name}:{number}: {phrase[0].strip()!r}, write {better}: {sentence}"
            figures = len(FIGURE.findall(sentence))
            if suffix == ".md" and figures > MOST_FIGURES and "|" not in passage:
                yield f"{name}:{number}: {figures} figures in a sentence, write a table: {sentence}"
    for number, line in enumerate(HIDDEN.sub(blank, text).splitlines(), 1) if suffix == ".md" else ():
        if len(NAMED.sub("X", line)) > LONGEST_LINE and not line.startswith("|"):
            yield f"{name}:{number}: {len(line)} characters, at most {LONGEST_LINE}"


def of_document(text: str) -> Iterator[Passage]:
    """Yield the paragraphs, the items of lists and the cells of tables, without code."""
    shown = HIDDEN.sub(blank, text)
    for part in re.finditer(r"(?:^(?!\|).*\S.*\n?(?:(?![-*|>#] ?|\d+\. ).*\S.*\n?)*)|^\|.*$", shown, re.M):
        number = shown.count("\n", 0, part.start()) + 1
        for cell in (
            part[0].strip("| ").split(" | ") if part[0].startswith("|") else [part[0].lstrip("-*># ")]
        ):
            yield number, cell if not part[0].startswith("|") else f"{cell} |"


def of_python(text: str) -> Iterator[Passage]:
    """Yield strings of several words, docstrings included, and blocks of comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for start in re.finditer(r"(?:^.*\S.*\n?)+", node.value, re.M):
                yield node.lineno + node.value.count("\n", 0, start.start()), start[0]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [
        (token.start[0], token.string.lstrip("# ")) for token in tokens if token.type == tokenize.COMMENT
    ]
    block: list[str] = []
    for place, (number, comment) in enumerate(comments):
        block.append(comment)
        if place + 1 == len(comments) or comments[place + 1][0] != number + 1:
            yield number - len(block) + 1, " ".join(block)
            block = []


def of_lines(text: str) -> Iterator[Passage]:
    """Yield the lines of a file of another kind."""
    for number, line in enumerate(text.splitlines(), 1):
        yield number, line.lstrip("#/<>!-* ")


def blank(found: re.Match[str]) -> str:
    """Return only the ends of lines of what is hidden, so that line numbers stay right."""
    return "\n" * found[0].count("\n")


READERS = {
    ".md": of_document,
    ".py": of_python,
    **dict.fromkeys((".yaml", ".js", ".html", ".cpp", ""), of_lines),
}

if __name__ == "__main__":
    sys.exit(main())
