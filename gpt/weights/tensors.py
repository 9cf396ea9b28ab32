"""Files of tensors, from disk to a dictionary.

No code in a file is ever run: pickles are read only by torch's restricted unpickler, and an index that names
files outside its own folder is refused.
"""

import json
import mmap
import re
import struct
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gpt.errors import InputError
from gpt.weights.formats.table import Weights

_SINGLE = ("model.safetensors", "pytorch_model.bin", "model.pth")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def read_tensors(folder: Path) -> Weights:
    """The tensors in a folder: in one file, or in the shards that an index lists.

    Raises:
        InputError: there are none, or they cannot be read.
    """
    for name in _SINGLE:
        if (folder / name).is_file():
            return _read_one(folder / name)
    for name in _INDEXES:
        if (folder / name).is_file():
            shards = shard_names(folder / name)
            return {key: tensor for shard in shards for key, tensor in _read_one(folder / shard).items()}
    raise InputError(f"expected one of {', '.join(_SINGLE + _INDEXES)} beside config.json")


def _read_one(path: Path) -> Weights:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        return strip_prefixes(load_pickle(path))
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError(f"{path.name} is listed in the index but missing") from None
    except SafetensorError as error:
        raise InputError(f"{path.name} is not a safetensors file, or it is broken: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        InputError: it is not JSON, or not a mapping.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path.name} is not a JSON object")
    return values


def load_pickle(path: Path) -> Any:
    """Read what `torch.save` wrote, tensors on the CPU and, if the file is a zip archive, memory-mapped.

    Checks the CRC-32 that `torch.save` stores for each tensor, which `torch.load` ignores.

    Raises:
        InputError: the file is broken, or holds more than tensors and plain values.
        OSError: it cannot be read.
    """
    zipped = zipfile.is_zipfile(path)
    try:
        if zipped:
            _compare_checksums(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # a broken file can raise anything
        if isinstance(error, OSError) and error.filename is not None:  # the file was never opened
            raise
        raise InputError("not a file of tensors, or it is broken") from None


def _compare_checksums(path: Path) -> None:
    """Raise BadZipFile where a member does not match its CRC-32. On all cores; `testzip` uses one."""
    with (
        zipfile.ZipFile(path) as archive,
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
        ThreadPoolExecutor() as pool,
    ):

        def is_intact(member: zipfile.ZipInfo) -> bool:
            name, extra = struct.unpack_from("<HH", data, member.header_offset + 26)
            start = member.header_offset + 30 + name + extra  # torch does not compress
            with data[start : start + member.file_size] as content:
                return zlib.crc32(content) == member.CRC

        if not all(pool.map(is_intact, archive.infolist())):
            raise zipfile.BadZipFile


def shard_names(index: Path) -> list[str]:
    """The files that an index of shards lists.

    Raises:
        InputError: it is not such an index, or lists a file outside its folder.
    """
    listed = read_json(index).get("weight_map")
    names = sorted(set(listed.values())) if isinstance(listed, dict) else []
    for name in names or [""]:
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*", name):
            raise InputError(f"{index.name} lists the file {name!r}, expected one beside it")
    return names


def strip_prefixes(state: Any, prefix: str = "") -> Weights:
    """Remove `prefix`, and the prefixes that DistributedDataParallel and torch.compile leave in names.

    Raises:
        InputError: the state is not a dictionary of tensors.
    """
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise InputError("expected a dictionary of tensors")
    names = {str(name): re.sub(r"(^|\.)(_orig_mod|module)\.", r"\1", str(name)) for name in state}
    return {names[str(name)].removeprefix(prefix): tensor for name, tensor in state.items()}
