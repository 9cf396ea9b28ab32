"""Draw docs/pipeline.svg and docs/architecture.svg: what happens to a text, and the parts of the model.

    python scripts/diagrams.py [--output docs]

Each box names the file that does it. tests/test_diagrams.py checks that these files exist, and that the
pictures in docs/ are those of this script.
"""

import argparse
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from gpt.files import atomic_write

WIDE = 190  # pixels
HIGH = 62


@dataclass(frozen=True, kw_only=True)
class Box:
    """A step: its middle, what it does, and the file that does it, if it is not an input."""

    x: int
    y: int
    what: str
    file: str = ""
    wide: int = WIDE

    def draw(self) -> str:
        """Return the box as SVG."""
        fill, line = ("#e8f1fa", "#0072b2") if self.file else ("#f5f5f5", "#888888")
        left, top = self.x - self.wide // 2, self.y - HIGH // 2
        shape = (
            f'<rect x="{left}" y="{top}" width="{self.wide}" height="{HIGH}" '
            f'rx="6" fill="{fill}" stroke="{line}"/>'
        )
        words = _text(self.x, self.y - 6 if self.file else self.y + 5, self.what, 15)
        return shape + words + (_text(self.x, self.y + 17, self.file, 12, "monospace") if self.file else "")


def _text(x: int, y: int, words: str, size: int, family: str = "sans-serif") -> str:
    style = f'font-family="{family}" font-size="{size}" text-anchor="middle" fill="#111111"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def _line(points: list[tuple[int, int]]) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    style = 'fill="none" stroke="#555555" stroke-width="1.5" marker-end="url(#head)"'
    return f'<polyline points="{path}" {style}/>'


ROWS = (
    (
        ("documents", "gpt/data/corpus.py"),
        ("what is held out", "gpt/data/split.py"),
        ("a vocabulary, a plan", "gpt/plan/rule.py"),
        ("files of tokens", "gpt/data/token_files.py"),
    ),
    (
        ("windows in batches", "gpt/data/windows.py"),
        ("the model", "gpt/model.py"),
        ("the loss", "gpt/training/loss.py"),
        ("an optimizer step", "gpt/training/module.py"),
    ),
    (
        ("rows, checkpoints", "gpt/run/loop.py"),
        ("text", "gpt/generation/engine.py"),
        ("scores", "gpt/evaluation/scoring.py"),
        ("a page, a server", "gpt/serve/app.py"),
    ),
)
"""The pipeline, in the order in which things happen. The last three boxes all use a checkpoint."""

TOWER = (
    ("tokens (B, T)", ""),
    ("token + position embedding", "gpt/model.py"),
    ("LayerNorm", "gpt/model.py"),
    ("multi-head attention", "gpt/attention/multi_head.py"),
    ("LayerNorm", "gpt/model.py"),
    ("feed-forward network", "gpt/model.py"),
    ("LayerNorm", "gpt/model.py"),
    ("head: logits (B, T, V)", "gpt/model.py"),
    ("next token", "gpt/generation/sampling.py"),
)
"""The model, from tokens to the next token. Boxes 2 to 5 are one block."""


def pipeline() -> str:
    """Return the picture of what happens to a text: three rows, each read from left to right."""
    parts = []
    for row, steps in enumerate(ROWS):
        y = 60 + 110 * row
        boxes = [Box(x=110 + 210 * i, y=y, what=what, file=file) for i, (what, file) in enumerate(steps)]
        if row < 2:
            parts += [_line([(box.x + WIDE // 2, y), (box.x + WIDE // 2 + 18, y)]) for box in boxes[:-1]]
        else:
            parts += [
                _line([(110, y + 31), (110, y + 60), (box.x, y + 60), (box.x, y + 33)]) for box in boxes[1:]
            ]
        if row:
            above = y - 110
            bend = y - 55
            parts.append(_line([(740, above + 31), (740, bend), (110, bend), (110, y - 33)]))
        parts += [box.draw() for box in boxes]
    return _picture(850, 355, parts)


def architecture() -> str:
    """Return the picture of the model, from the bottom to the top."""
    step, bottom, frame = 100, 840, HIGH // 2 + 22
    boxes = [
        Box(x=300, y=bottom - step * i, what=what, file=file, wide=230)
        for i, (what, file) in enumerate(TOWER)
    ]
    parts = [
        f'<rect x="130" y="{boxes[5].y - frame}" width="310" height="{3 * step + 2 * frame}" rx="10" '
        'fill="none" stroke="#d55e00" stroke-dasharray="6 4"/>',
        _text(560, boxes[3].y - step // 2 - 6, "one block,", 15),
        _text(560, boxes[3].y - step // 2 + 14, "repeated num_layers times", 15),
    ]
    for below, above in pairwise(boxes):
        parts.append(_line([(300, below.y - HIGH // 2), (300, above.y + HIGH // 2 + 2)]))
    for first, last in ((2, 3), (4, 5)):  # the residual connections
        low, high = boxes[first].y + HIGH // 2 + 11, boxes[last].y - HIGH // 2 - 11
        parts.append(_line([(300, low), (160, low), (160, high), (290, high)]))
        parts.append(f'<circle cx="300" cy="{high}" r="9" fill="white" stroke="#555555" stroke-width="1.5"/>')
        parts.append(_text(300, high + 6, "+", 18))
    return _picture(700, 890, [*parts, *(box.draw() for box in boxes)])


def _picture(width: int, height: int, parts: list[str]) -> str:
    head = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="#555555"/></marker>'
    )
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">'
    lines = [frame, f"<defs>{head}</defs>", '<rect width="100%" height="100%" fill="white"/>', *parts]
    return "\n".join([*lines, "</svg>", ""])


PICTURES = {"pipeline.svg": pipeline, "architecture.svg": architecture}


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs"), help="the folder for the pictures")
    folder = parser.parse_args().output
    for name, draw in PICTURES.items():
        with atomic_write(folder / name, "w") as file:
            file.write(draw())


if __name__ == "__main__":
    main()
