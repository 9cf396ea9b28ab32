"""Count the code tokens of the package: `python scripts/budget.py` fails where it has grown.

Tokens are Python's own, without comments, docstrings and layout, so denser lines are no smaller.
"""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The files of a part, and how many tokens they may have."""

    patterns: tuple[str, ...]
    limit: int


BUDGETS = {
    "gpt/": Budget(patterns=("gpt/**/*.py",), limit=73_168),
    # What someone reads to understand how the model is trained, in reading order.
    "core path": Budget(
        patterns=(
            "gpt/config.py",
            "gpt/attention/__init__.py",
            "gpt/attention/multi_head.py",
            "gpt/attention/kernels.py",
            "gpt/attention/cache.py",
            "gpt/attention/capture.py",
            "gpt/model.py",
            "gpt/data/windows.py",
            "gpt/data/module.py",
            "gpt/training/module.py",
            "gpt/training/loss.py",
            "gpt/training/schedule.py",
            "gpt/training/optimizers/recipe.py",
            "gpt/training/optimizers/muon.py",
            "gpt/training/optimizers/combined.py",
        ),
        limit=11_435,
    ),
}


def tokens(text: str) -> int:
    """The code tokens of a Python file."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else []:
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.add(value.lineno)
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(
        token.type not in LAYOUT and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in found
    )


def count(root: Path, patterns: tuple[str, ...]) -> int:
    """The tokens of the files that match. A pattern without a file raises FileNotFoundError."""
    total = 0
    for pattern in patterns:
        files = list(root.glob(pattern))
        if not files:
            raise FileNotFoundError(f"no file matches {pattern}: update scripts/budget.py")
        total += sum(tokens(file.read_text(encoding="utf-8")) for file in files)
    return total


def main(root: Path = ROOT) -> int:
    """Print the counts; return 1 if one is above its limit."""
    over = 0
    for name, budget in BUDGETS.items():
        found = count(root, budget.patterns)
        over += found > budget.limit
        told = ": TOO MANY" if found > budget.limit else ""
        print(f"{name:<10}{found:>8,} code tokens, limit {budget.limit:,}{told}")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
