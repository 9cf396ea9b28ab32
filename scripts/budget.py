"""Count the lines of the package: `python scripts/budget.py` fails where one of the two budgets is exceeded.

Every line of a Python file counts, comments and blank lines too.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ("gpt/**/*.py",)
# What someone reads to understand how the model is trained, in reading order.
CORE = (
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
    "gpt/training/optimizers/master_weights.py",
)
BUDGETS = {"gpt/": (PACKAGE, 10_300), "core path": (CORE, 1_700)}


def lines(root: Path, patterns: tuple[str, ...]) -> int:
    """The number of lines in the files that match. A pattern without a file raises FileNotFoundError."""
    total = 0
    for pattern in patterns:
        files = list(root.glob(pattern))
        if not files:
            raise FileNotFoundError(f"no file matches {pattern}: update scripts/budget.py")
        total += sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    return total


def main(root: Path = ROOT) -> int:
    """Print both counts; return 1 if one is above its limit."""
    counts = {name: lines(root, patterns) for name, (patterns, _) in BUDGETS.items()}
    for name, count in counts.items():
        limit = BUDGETS[name][1]
        print(f"{name:<10}{count:>7,} lines, limit {limit:,}{'' if count <= limit else ': TOO MANY'}")
    return int(any(count > BUDGETS[name][1] for name, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
