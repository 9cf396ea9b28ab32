"""A short run of scripts/torture.py; the long one is run by hand."""

import os
import re

import pytest
from processes import run_script


@pytest.mark.slow
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
    ended = run_script("torture.py", *(word for pair in counts.items() for word in pair))
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    table = [re.split(r"\s{2,}", line) for line in ended.stdout.splitlines()[1:]]
    expected = [(number, 0) for number in counts.values() if number]
    assert sorted((int(injected), int(lost)) for _, injected, _, lost in table) == sorted(expected)
