"""Print the lines of the project by room and language: `python scripts/size.py`.

A room is a folder of the package, or one of the folders beside it. Nothing fails by these numbers.
"""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LANGUAGES = {".py": "Python", ".cpp": "C++", ".js": "JavaScript", ".html": "HTML"}
FOLDERS = ("gpt", "scripts", "tests")


def room_of(file: Path) -> str:
    """`gpt/run` for a file in it, `gpt` for one directly in the package; of other folders the first part."""
    folder = file.parent.parts
    return "/".join(folder[:2]) if folder[0] == "gpt" else folder[0]


def count_lines(root: Path = ROOT) -> dict[str, Counter[str]]:
    """Lines of each language in each room, blank lines and comments included."""
    rooms: dict[str, Counter[str]] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            language = LANGUAGES.get(path.suffix)
            if language is None or not path.is_file():
                continue
            room = room_of(path.relative_to(root))
            lines = path.read_text(encoding="utf-8").splitlines()
            rooms.setdefault(room, Counter())[language] += len(lines)
    return rooms


def main() -> None:
    """Print a table: a row for each room, a column for each language."""
    rooms = count_lines()
    languages = list(LANGUAGES.values())
    rooms["sum"] = sum(rooms.values(), Counter())
    print("room".ljust(20), *(language.rjust(10) for language in languages))
    for room, lines in rooms.items():
        print(room.ljust(20), *(f"{lines[language]:10,}" for language in languages))


if __name__ == "__main__":
    main()
