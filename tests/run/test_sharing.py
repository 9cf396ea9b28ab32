"""Threads that sleep instead of spinning while other programs need the cores."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from threading import Event

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


@dataclass
class Looks:
    """The run's end, which is looked at now and then: threads wait for a core for `shares` of a second."""

    shares: list[float]
    teams: list[Event] = field(default_factory=list)
    waited: float = 0.0
    seen: list[list[str]] = field(default_factory=list)
    """The teams at each look."""

    def wait(self, seconds: float) -> bool:
        self.seen.append(["ended" if team.is_set() else "sleeping" for team in self.teams])
        if not self.shares:
            return True
        self.waited += self.shares.pop(0) * seconds
        return False

    def sleeping_team(self) -> Event:
        self.teams.append(Event())
        return self.teams[-1]


def test_the_teams_stay_while_the_cores_are_busy(monkeypatch):
    looks = Looks(shares=[0.1, 0.9, 0.1, 0.01, 0.9])
    monkeypatch.setattr(threads, "sleeping_teams", looks.sleeping_team)
    monkeypatch.setattr(threads, "seconds_waited", lambda: looks.waited)
    share_cores(looks)
    assert looks.seen == [[], [], ["sleeping"], ["sleeping"], ["ended"], ["ended", "sleeping"]]
    assert all(team.is_set() for team in looks.teams)  # the second one at the end of the run
