"""Files of tensors, from disk to a dictionary.

No code in a file is ever run: pickles are read by torch's restricted unpickler alone, and an index that names
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
from gpt.weights.table import Weights

_SINGLE = ("model.safetensors", "pytorch_model.bin", "model.pth")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def read_tensors(folder: Path) -> Weights:
    """The tensors of a folder: of one file, or of the shards that an index names.

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
        raise InputError(f"{path.name} is missing, which the index names") from None
    except SafetensorError as error:
        raise InputError(f"{path.name} is not a safetensors file, or a broken one: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        InputError: it is not JSON, or no mapping.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path.name} holds no mapping")
    return values


def load_pickle(path: Path) -> Any:
    """What `torch.save` wrote, tensors on the CPU and, where the format allows it, left on disk until used.

    The checksum that `torch.save` puts beside each tensor is compared: `torch.load` ignores it.

    Raises:
        InputError: the file is broken, or holds anything but tensors and plain values.
        OSError: it cannot be read.
    """
    zipped = zipfile.is_zipfile(path)
    try:
        if zipped:
            _compare_checksums(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # what the bytes of a broken file bring about can be anything
        if isinstance(error, OSError) and error.filename is not None:  # the file was never opened
            raise
        raise InputError("not a file of tensors, or a broken one") from None


def _compare_checksums(path: Path) -> None:
    """Raise BadZipFile where a member's bytes are not those of its CRC-32; `testzip` uses one core for it."""
    with (
        zipfile.ZipFile(path) as archive,
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as data,
        ThreadPoolExecutor() as pool,
    ):

        def is_whole(member: zipfile.ZipInfo) -> bool:
            name, extra = struct.unpack_from("<HH", data, member.header_offset + 26)
            start = member.header_offset + 30 + name + extra  # of the bytes, which torch does not compress
            with data[start : start + member.file_size] as content:
                return zlib.crc32(content) == member.CRC

        if not all(pool.map(is_whole, archive.infolist())):
            raise zipfile.BadZipFile


def shard_names(index: Path) -> list[str]:
    """The files over which a model is spread, from its index.

    Raises:
        InputError: the index is none, or names a file outside its folder.
    """
    listed = read_json(index).get("weight_map")
    names = sorted(set(listed.values())) if isinstance(listed, dict) else []
    for name in names or [""]:
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*", name):
            raise InputError(f"{index.name} names the file {name!r}, expected one beside it")
    return names


def strip_prefixes(state: Any, prefix: str = "") -> Weights:
    """Without the prefixes that a wrapper or a compiler left in the names.

    Raises:
        InputError: something else than tensors by name.
    """
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise InputError("expected a dictionary of tensors")
    names = {str(name): re.sub(r"(^|\.)(_orig_mod|module)\.", r"\1", str(name)) for name in state}
    return {names[str(name)].removeprefix(prefix): tensor for name, tensor in state.items()}
