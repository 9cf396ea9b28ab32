"""Read untrusted files of tensors: run no code, and use no more memory than the file's size."""

import pickle
import pickletools
import re
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save

from gpt.errors import InputError
from gpt.files import atomic_write, readable
from gpt.plain import JsonObject, parse_json
from gpt.weights.formats.table import Weights

# The only names that pickled tensors need. torch's restricted unpickler also allows bytearray and
# torch.FloatTensor, which allocate as much memory as a pickle asks for.
_GLOBALS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor(_v2)?|parameter)|"
    r"torch (Size|device|[A-Z]\w+Storage|b?float\d+|u?int\d+|bool)"
)


def read_tensors(folder: Path) -> Weights:
    """Read the tensors of model.safetensors in a folder."""
    path = folder / "model.safetensors"
    if not path.is_file():
        raise InputError(f"there is no {path.name} beside config.json")
    try:
        # The library cannot open a file whose name is not UTF-8.
        return load_file(path) if readable(str(path)) == str(path) else load(path.read_bytes())
    except SafetensorError as error:
        raise InputError(f"{path.name} is not a safetensors file, or it is broken: {error}") from None


def write_tensors(folder: Path, tensors: Weights) -> None:
    """Write model.safetensors into a folder."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with atomic_write(folder / "model.safetensors", "wb") as file:
        file.write(save(whole, metadata={"format": "pt"}))


def read_json(path: Path) -> JsonObject:
    """Read the mapping in a JSON file."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path.name} is not a JSON object")
    return values


def read_pickle(path: Path) -> tuple[JsonObject, Weights]:
    """Read a file of `torch.save`; return its contents, and the tensors in its `model` or `model_state_dict`.

    The tensors are on the CPU and memory-mapped. Raises InputError for a file that holds anything other than
    tensors and plain values, and for one that claims more than its size. The format from before PyTorch 1.6
    is refused too: it is a bare pickle, which can ask for any amount of memory.
    """
    try:
        _check_archive(path)
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file can raise any exception
        if isinstance(error, OSError) and error.filename is not None:  # the file could not be opened
            raise
        raise InputError("not a file of tensors as PyTorch 1.6 and later save them, or broken") from None
    state = saved
    for name in ("model", "model_state_dict"):
        state = state.get(name, state) if isinstance(state, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise InputError("expected a dictionary of tensors")
    # Names may share a tensor, as with a tied head, but then a small file could claim a huge model. The masks
    # of the book's GPTModel are not read, and its blocks may share a large one.
    sizes = [tensor.nbytes for name, tensor in state.items() if not str(name).endswith(".att.mask")]
    if sum(sizes) > 2 * path.stat().st_size:
        raise InputError("its tensors are larger than the file")
    return saved, {str(name).removeprefix("_orig_mod."): tensor for name, tensor in state.items()}


def _check_archive(path: Path) -> None:
    """Raise an error if an archive unpacks to more than its size, or its pickle names unknown code."""
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
