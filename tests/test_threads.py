"""Threads that sleep instead of spinning while other programs need the cores."""

import os
import subprocess
import sys
from threading import Event
from types import SimpleNamespace

import pytest

from gpt import threads
from gpt.threads import share_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SPINNING = """
import time, torch
from gpt.threads import sleeping_teams
torch.set_num_threads(2)
work = lambda: torch.ones(1 << 18).sum()
def processor_time():
    before = time.process_time()
    for _ in range(40):
        work()
        time.sleep(0.01)  # OpenMP's second thread spins for longer than that
    return time.process_time() - before
spinning = processor_time()
teams = sleeping_teams()
sleeping = processor_time()
teams.set()
time.sleep(0.2)
print(sleeping / spinning, processor_time() / spinning)
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_more_threads_than_cores_end_the_spinning():
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", SPINNING]
    output = subprocess.check_output(command, env={**environment, "OMP_NUM_THREADS": "2"}, timeout=120)
    while_held, afterwards = map(float, output.split())
    assert while_held < 0.5
    assert afterwards > 0.5


def test_the_teams_stay_while_the_cores_are_busy(monkeypatch):
    """Between two looks, threads wait for a core for these shares of the time."""
    shares = iter([0.1, 0.9, 0.1, 0.01, 0.9])
    waited = 0.0
    teams = []
    seen = []  # at each look, which teams have ended

    def wait(seconds: float) -> bool:
        nonlocal waited
        seen.append([team.is_set() for team in teams])
        share = next(shares, None)
        waited += seconds * (share or 0.0)
        return share is None

    def sleeping_team() -> Event:
        teams.append(Event())
        return teams[-1]

    monkeypatch.setattr(threads, "sleeping_teams", sleeping_team)
    monkeypatch.setattr(threads, "seconds_waited", lambda: waited)
    share_cores(SimpleNamespace(wait=wait))
    assert seen == [[], [], [False], [False], [True], [True, False]]
    assert all(team.is_set() for team in teams)  # the second one at the end of the run
