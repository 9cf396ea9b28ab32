"""The memory that a process's control groups leave it, as Linux shows them; `test_cores.py` has CPU time."""

import math

import pytest

from gpt.cgroups import free_memory
from tests.test_cores import VERSION_1, system

VERSION_2 = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 400\ninactive_file 50"}
OLD = {
    "memory/memory.limit_in_bytes": "1000",
    "memory/memory.usage_in_bytes": "900",
    "memory/memory.stat": "total_inactive_file 200",
}
ABOVE = {f"user/{name}": value for name, value in VERSION_2.items()}
MACHINES = {
    "with cached files, which can be dropped": ("0::/", VERSION_2, 350),
    "no limit": ("0::/", {**VERSION_2, "memory.max": "max"}, math.inf),
    "a limit of the group above": ("0::/user/me", ABOVE, 350),
    "more in use than allowed": ("0::/", {**VERSION_2, "memory.current": "2000"}, 0),
    "version 1": (f"{VERSION_1}\n7:memory:/docker/0123", OLD, 300),
    "no such group": ("0::/", {}, math.inf),
}


@pytest.mark.parametrize(("group", "files", "expected"), MACHINES.values(), ids=MACHINES)
def test_the_memory_that_a_group_leaves(group, files, expected, tmp_path):
    assert free_memory(system(tmp_path, group, files)) == expected
