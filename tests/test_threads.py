"""Threads on cores of their own."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="binds threads on Linux alone")
CORES = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
CODE = """
import json, os, torch
from gpt import threads
work = lambda: torch.ones(1 << 18).sum()
{}
work()
allowed = {{tid: sorted(os.sched_getaffinity(int(tid))) for tid in os.listdir("/proc/self/task")}}
print(json.dumps([allowed.pop(str(os.getpid())), sorted(allowed.values())]))
"""


def bound(code="threads.spread_threads()", **environment):
    """The cores that the main thread and each of the others may run on."""
    inherited = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    inherited |= {"OMP_NUM_THREADS": str(len(CORES)), **environment}
    command = [sys.executable, "-c", CODE.format(code)]
    return json.loads(subprocess.check_output(command, env=inherited, timeout=120))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_each_thread_but_the_calling_one_is_bound_to_a_core_of_its_own():
    main, others = bound()
    assert main == CORES
    assert [[core] for core in CORES[1:]] == [one for one in others if len(one) == 1]


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_thread_is_watched_once():
    main, others = bound("threads.spread_threads()")
    again = bound("for _ in range(3): threads.spread_threads()")
    assert again == [main, others]


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_the_calling_thread_comes_back_to_its_core():
    moved = f"""
threads.spread_threads()
for core in {CORES[1:]}:
    os.sched_setaffinity(0, {{core}})
    assert threads.core_of(os.getpid()) == core
    end = threads.time.monotonic() + 10
    while threads.core_of(os.getpid()) != {CORES[0]}:  # it may run on no other until it is moved
        assert threads.time.monotonic() < end
"""
    main, _ = bound(moved)
    assert main == CORES


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("code", "environment"),
    [
        ("pass", {}),
        ("threads.spread_threads()", {"OMP_PROC_BIND": "false"}),
        (f"torch.set_num_threads({len(CORES) + 1}); threads.spread_threads()", {}),
        ("threads.sys.platform = 'darwin'; threads.spread_threads()", {}),
        ("threads.torch.cuda.is_available = lambda: True; threads.spread_threads()", {}),
        ("threads.spread_threads()", {"WORLD_SIZE": "2"}),
        ("threads.spread_threads()", {"SLURM_NTASKS": "8"}),
    ],
)
def test_what_is_chosen_or_unusual_is_left_alone(code, environment):
    main, others = bound(code, **environment)
    assert main == CORES
    assert all(one == CORES for one in others)
    assert others
