"""Read files of tensors without trusting them: no code is run, and no more memory used than a file's size."""

import json
import pickle
import pickletools
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch

from gpt.errors import InputError
from gpt.weights.formats.table import Weights

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FILES = ("model.safetensors", "pytorch_model.bin", "model.pth", *_INDEXES)
# What pickled tensors need. torch's restricted unpickler also knows bytearray and torch.FloatTensor, which
# allocate whatever a pickle asks for.
_GLOBALS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor(_v2)?|parameter)|"
    r"torch (Size|device|[A-Z]\w+Storage|b?float\d+|u?int\d+|bool)"
)


def read_tensors(folder: Path) -> Weights:
    """The tensors in a folder, in one file or in the shards that an index lists."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    beside = {file.name for file in folder.iterdir() if file.is_file()}
    found = next((name for name in _FILES if name in beside), None)
    if found is None:
        raise InputError(f"expected one of {', '.join(_FILES)} beside config.json")
    names = {found}
    if found in _INDEXES:
        names = set(read_json(folder / found)["weight_map"].values()) or {""}
        if others := names - beside:
            raise InputError(f"{found} lists the file {others.pop()!r}, expected one beside it")
    weights: Weights = {}
    for path in (folder / name for name in sorted(names)):
        try:
            weights |= load_file(path) if path.suffix == ".safetensors" else strip_prefixes(load_pickle(path))
        except SafetensorError as error:
            raise InputError(f"{path.name} is not a safetensors file, or it is broken: {error}") from None
    return weights


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path.name} is not a JSON object")
    return values


def load_pickle(path: Path) -> Any:
    """What another program wrote with `torch.save`: tensors and plain values, on the CPU and memory-mapped.

    InputError for a file that holds more, or whose CRC-32 differ. The format from before PyTorch 1.6 is a
    bare pickle, which can ask for any amount of memory: load it and save it again.
    """
    try:
        _check_archive(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a broken file can raise anything
        if isinstance(error, OSError) and error.filename is not None:  # the file was never opened
            raise
        raise InputError("not a file of tensors as PyTorch 1.6 and later save them, or broken") from None


def _check_archive(path: Path) -> None:
    """An error where a member is compressed, its CRC-32 differs, or a pickle names more than tensors need."""
    with zipfile.ZipFile(path) as archive, ThreadPoolExecutor() as pool:

        def read(member: zipfile.ZipInfo) -> None:
            with archive.open(member) as content:
                while content.read(1 << 22):  # compares the CRC-32 at the end
                    pass

        members = archive.infolist()
        stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
        if not stored or sum(member.file_size for member in members) > path.stat().st_size:
            raise zipfile.BadZipFile
        list(pool.map(read, members))
        for member in members:
            if member.filename.endswith("data.pkl"):
                with archive.open(member) as pickled:
                    _check_pickle(pickled)


def _check_pickle(file: IO[bytes]) -> None:
    """An UnpicklingError where a pickle names more than tensors need; nothing is unpickled."""
    for operation, argument, _ in pickletools.genops(file):
        allowed = {"GLOBAL": _GLOBALS, "PROTO": re.compile("2")}.get(operation.name)  # torch warns of others
        if allowed and not allowed.fullmatch(str(argument)):
            raise pickle.UnpicklingError(f"{operation.name} {argument}")


def strip_prefixes(state: Any, prefix: str = "") -> Weights:
    """The tensors without `prefix`, and what DistributedDataParallel and torch.compile leave in names."""
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise InputError("expected a dictionary of tensors")
    for name, tensor in state.items():  # a tensor of stride 0 is larger than its memory
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise InputError(f"{name} of shape {tuple(tensor.shape)} is not stored in full")
    names = {str(name): re.sub(r"(^|\.)(_orig_mod|module)\.", r"\1", str(name)) for name in state}
    return {names[str(name)].removeprefix(prefix): tensor for name, tensor in state.items()}
