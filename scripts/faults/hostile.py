"""Give hostile files to the `gpt` command, and see that it refuses them and does nothing else."""

import os
import shlex
import shutil
from pathlib import Path

from faults.forked import run
from faults.hostile_files import Hostile
from faults.watched import watch

SECONDS = 60.0
MEMORY = 1_000_000_000
"""Bytes that refusing a file may take beyond those of the imported program."""
LOG = "guard.log"


def meet(hostile: Hostile, folder: Path, intact: Path) -> str | None:
    """Run one case in a new folder; None if the file was refused and nothing happened, else what did."""
    case = folder / "case"
    shutil.rmtree(case, ignore_errors=True)
    case.mkdir()
    shutil.copy(folder / "text.txt", case)
    (case / "evil").mkdir()
    path = hostile.write(intact, case / "evil").relative_to(case)
    before = set(case.rglob("*"))
    command = [word.replace("{}", str(path)) for word in shlex.split(hostile.command)]
    ended = run(case, command, sabotage=lambda rank: guard(case), kill_after=SECONDS)
    new = {file.name for file in set(case.rglob("*")) - before} - {"out.0", "err.0", "status.0", LOG}
    lines = ended.err.splitlines()
    seen = (case / LOG).read_text(encoding="utf-8").splitlines()
    if ended.status == -9:
        return f"no answer within {SECONDS:.0f} seconds"
    if seen or new:
        return f"status {ended.status}: {'; '.join(seen[:3])} {sorted(new)[:5]} {ended.err[-300:]!r}"
    if ended.peak > baseline() + MEMORY:
        return f"status {ended.status} after taking {ended.peak / 1e9:.1f} GB: {ended.err[-300:]!r}"
    if ended.status != 2 or len(lines) != 1 or not lines[0].isprintable():
        return f"status {ended.status}: {ended.err[-300:]!r}"
    return None


def guard(case: Path) -> None:
    """In the process under test: log every forbidden event; only `case` and the cache may be written to."""
    log = os.open(case / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    watch(lambda event: os.write(log, f"{event}\n".encode()), case, Path(os.environ["GPT_CACHE"]))


def baseline() -> int:
    """Bytes that this process holds now, which a forked one starts with."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
