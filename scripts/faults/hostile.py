"""Hostile files for `torture.py`: intact but for one place, or a pickle with code.

A command that gets one may refuse it in one line, or take it for what it is. It starts no process, opens no
connection, unpickles no class and writes nowhere else. Files that lie about their size: tests/weights.
"""

import json
import math
import os
import pickle
import random
import shlex
import shutil
from pathlib import Path
from typing import Any

import yaml
from faults.forked import run
from faults.watched import watch

from gpt.weights.checkpoint import _checksum, read

SECONDS = 60.0
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": "echo pwned > pwned", "shell": True}}
VALUES: tuple[Any, ...] = (
    *(POPEN, [POPEN], "os.system", "evil_module.Evil", "https://evil.example/a.yaml", "evil/data"),
    *("../../outside", "/etc/passwd", "", "x\0", "\x1b[2J", "x" * 100_000, "9" * 10_000),
    *(0, -1, 1 << 70, 0.5, math.nan, True, None, [], {}, [[[[]]]]),
)
TEXTS = (
    "trainer: !!python/object/apply:os.system ['echo pwned > pwned']\n",
    *("trainer: !!python/name:os.system\n", "model: &a {config: *a}\n", "model: [", "42", "\x00\x01"),
    *("trainer: " + "[" * 5000, "seed_everything: " + "9" * 100_000),
)
COMMANDS = (
    "fit --resume {}",
    "generate --prompt a --max_new_tokens 1 --checkpoint {}",
    "export --format hf --output exported --checkpoint {}",
    "fit --data.corpus text.txt --trainer.max_steps 5 --model.init_from {}",
)


class Code:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("echo pwned > pwned",)


def changed(tree: Any, chance: random.Random) -> Any:
    """A tree of JSON with a hostile value in one place, or with a name more."""
    if not isinstance(tree, dict) or not tree or chance.random() < 0.1:
        return chance.choice(VALUES)
    name = chance.choice([*tree, "class_path", "config", "auto_map"])
    return {**tree, name: changed(tree.get(name), chance)}


def checkpoint(intact: Path, folder: Path, chance: random.Random) -> Path:
    """Another value in what a checkpoint says of its run or model, with the checksum of the result."""
    path, to = intact / "checkpoints" / "last.safetensors", folder / "evil.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    texts, part = header["__metadata__"], chance.choice(("run", "model"))
    texts[part] = json.dumps(changed(json.loads(texts[part]), chance))
    texts["checksum"] = _checksum(read(path).tensors, texts)
    text = json.dumps(header).encode()
    to.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return to


def config(intact: Path, folder: Path, chance: random.Random) -> Path:
    """Options of a run."""
    options = yaml.safe_load((intact / "config.yaml").read_text(encoding="utf-8"))
    text = chance.choice((yaml.safe_dump(changed(options, chance)), chance.choice(TEXTS)))
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    return folder / "config.yaml"


def pickled(intact: Path, folder: Path, chance: random.Random) -> Path:
    """Code, as weights of another program."""
    path = folder / chance.choice(("model.pth", "ckpt.pt", "pytorch_model.bin"))
    path.write_bytes(pickle.dumps(Code(), chance.choice((0, 2, 4))))
    return path


def meet(folder: Path, intact: Path, chance: random.Random) -> str | None:
    """Give a command a hostile file in a new folder; None if only what may happen did, else what did."""
    case = folder / "case"
    shutil.rmtree(case, ignore_errors=True)
    (case / "evil").mkdir(parents=True)
    shutil.copy(folder / "text.txt", case)
    (case / "evil_module.py").write_text("open('pwned', 'w').close()\n", encoding="utf-8")
    kind = chance.choice((checkpoint, checkpoint, config, pickled))
    path = kind(intact, case / "evil", chance)
    command = "fit --trainer.max_steps 5 --config {}" if kind is config else chance.choice(COMMANDS)
    words = shlex.split(command.replace("{}", str(path.relative_to(case))))
    ended = run(case, words, sabotage=lambda rank: guard(case), kill_after=SECONDS)
    seen = (case / "guard.log").read_text(encoding="utf-8").splitlines()
    seen = [event for event in seen if "'uname'" not in event]  # Python's own, to name the machine
    trained = ended.status == -9 and "planned: " in ended.err  # as long as it was told to
    lines = ended.err.splitlines()
    refused = ended.status == 2 and all(line.startswith("gpt ") and line.isprintable() for line in lines)
    taken = kind is not pickled and (ended.status == 0 or trained)
    if (refused or taken) and not seen and not list(case.rglob("pwned")):
        return None
    return f"{kind.__name__}: gpt {command}: status {ended.status}: {seen[:3]}: {ended.err[-300:]!r}"


def guard(case: Path) -> None:
    """In the process under test: log every forbidden event; only `case` and the cache may be written to."""
    log = os.open(case / "guard.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    watch(lambda event: os.write(log, f"{event}\n".encode()), case, Path(os.environ["GPT_CACHE"]))
