"""Put the present page around the model in docs/demo.html: python scripts/demo.py

The file's model stays. A test compares the page in it with the one of the package.
"""

import json
import re
from pathlib import Path

from gpt.files import atomic_write
from gpt.plain import JsonObject
from gpt.share.page import page_of

DEMO = Path(__file__).resolve().parents[1] / "docs" / "demo.html"
_DESCRIPTION = "const FILE = "
_BLOCK = re.compile(r'<script type="text/plain" id="block\d+">([^<]*)</script>')


def main() -> None:
    """Write the file again."""
    page = renewed(DEMO.read_text("utf-8"))
    with atomic_write(DEMO, "wb") as file:
        file.write(page.encode())


def renewed(page: str) -> str:
    """Return the present page with the model of another one."""
    return page_of(_description(page), _BLOCK.findall(page))


def _description(page: str) -> JsonObject:
    """Return what a page says of its model."""
    _, _, rest = page.partition(_DESCRIPTION)
    description: JsonObject
    description, _ = json.JSONDecoder().raw_decode(rest)
    return description


if __name__ == "__main__":
    main()
