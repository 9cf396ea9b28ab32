"""Nothing that the tests start outlives them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watch import descendants

PROGRAM = """
import os, subprocess, sys
os.environ["GPT_TESTS"] = str(os.getpid())
subprocess.Popen([sys.executable, {watch!r}, str(os.getpid())])
subprocess.Popen(["sleep", "600"], start_new_session=True)
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_what_a_killed_process_started_in_a_session_of_its_own_ends():
    program = PROGRAM.format(watch=str(Path(__file__).with_name("watch.py")))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", program], **pipes, env=dict(os.environ))
    assert process.stdout.readline() == b"\n"
    mark = f"GPT_TESTS={process.pid}".encode()
    assert len(descendants(mark)) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while descendants(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)
