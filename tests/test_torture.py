"""A short run of scripts/torture.py; the long one is run by hand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize(
    "counts",
    [
        {"--kills": 5, "--kills2": 1, "--damages": 3, "--malformed": 24},
        {"--hostile-checkpoints": 25},
        {"--meetings": 4},
        {"--hostile-requests": 200},
    ],
    ids=lambda counts: next(iter(counts)),
)
def test_nothing_is_lost(counts):
    counts = dict.fromkeys(("--kills", "--damages", "--malformed"), 0) | counts
    ended = subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts" / "torture.py"),
            *(word for name, number in counts.items() for word in (name, str(number))),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    table = [re.split(r"\s{2,}", line) for line in ended.stdout.splitlines()[1:]]
    expected = [(number, 0) for number in counts.values() if number]
    assert sorted((int(injected), int(lost)) for _, injected, _, lost in table) == sorted(expected)
