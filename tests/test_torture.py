"""Short runs of scripts/torture.py and scripts/soak.py; the long ones are run by hand."""

import os
import re

import pytest
from processes import run_script


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_nothing_is_lost():
    counts = {"--kills": 5, "--kills2": 1, "--damages": 3, "--resumes": 3, "--returns": 3, "--races": 3}
    ended = run_script("torture.py", *(word for pair in counts.items() for word in pair))
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
    table = [re.split(r"\s{2,}", line) for line in ended.stdout.splitlines()[1:]]
    assert [(int(injected), int(lost)) for _, injected, _, lost in table] == [(n, 0) for n in counts.values()]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="reads /proc")
def test_hostile_requests_are_survived():
    ended = run_script("soak.py", "--requests", "200", "--hostile", "0.9")
    assert ended.returncode == 0, ended.stdout + ended.stderr[-3000:]
