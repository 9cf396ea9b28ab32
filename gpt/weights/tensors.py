"""Read files of tensors without trusting them: no code is run, and no more memory used than a file's size."""

import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save

from gpt.errors import InputError
from gpt.files import atomic_write
from gpt.plain import parse_json
from gpt.weights.formats.table import Weights

# What pickled tensors need. torch's restricted unpickler also knows bytearray and torch.FloatTensor, which
# allocate whatever a pickle asks for.
_GLOBALS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor(_v2)?|parameter)|"
    r"torch (Size|device|[A-Z]\w+Storage|b?float\d+|u?int\d+|bool)"
)


def read_tensors(folder: Path) -> Weights:
    """The tensors of model.safetensors in a folder."""
    path = folder / "model.safetensors"
    if not path.is_file():
        raise InputError(f"there is no {path.name} beside config.json")
    try:
        # The library opens no file whose name is not UTF-8.
        return load_file(path) if is_utf8(path) else load(path.read_bytes())
    except SafetensorError as error:
        raise InputError(f"{path.name} is not a safetensors file, or it is broken: {error}") from None


def is_utf8(path: Path) -> bool:
    """Whether a path's bytes are UTF-8, as libraries in other languages expect."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def write_tensors(folder: Path, tensors: Weights) -> None:
    """Write model.safetensors into a folder."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with atomic_write(folder / "model.safetensors", "wb") as file:
        file.write(save(whole, metadata={"format": "pt"}))


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path.name} is not a JSON object")
    return values


def read_pickle(path: Path) -> tuple[dict[str, Any], Weights]:
    """What another program wrote with `torch.save`, and the tensors in it, its `model` or `model_state_dict`.

    They are on the CPU and memory-mapped. InputError for a file that holds other than tensors and plain
    values, or claims more than its size. The format from before PyTorch 1.6 is a bare pickle, which can ask
    for any amount of memory: load it and save it again.
    """
    try:
        _check_archive(path)
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a broken file can raise anything
        if isinstance(error, OSError) and error.filename is not None:  # the file was never opened
            raise
        raise InputError("not a file of tensors as PyTorch 1.6 and later save them, or broken") from None
    found = saved
    for name in ("model", "model_state_dict"):
        found = found.get(name, found) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise InputError("expected a dictionary of tensors")
    # Two names may share a tensor, as a tied head does; a small file of a large model is an attack.
    if sum(tensor.nbytes for tensor in found.values()) > 2 * path.stat().st_size:
        raise InputError("its tensors are larger than the file")
    return saved, {str(name).removeprefix("_orig_mod."): tensor for name, tensor in found.items()}


def _check_archive(path: Path) -> None:
    """An error where an archive unpacks to more than its file, or a pickle names more than tensors need."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > path.stat().st_size:
            raise zipfile.BadZipFile
        for member in members:
            if member.filename.lower().endswith(".pkl"):
                with archive.open(member) as pickled:
                    for operation, argument, _ in pickletools.genops(pickled):
                        if operation.name == "GLOBAL" and not _GLOBALS.fullmatch(str(argument)):
                            raise pickle.UnpicklingError(argument)
