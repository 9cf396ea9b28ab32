"""Find weights: a path, or a model on the Hugging Face hub, which is downloaded once and cached."""

import logging
import os
import sys
from pathlib import Path

from gpt.errors import InputError
from gpt.weights.tensors import shard_names

_SHORT_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


def locate(path: str | os.PathLike[str]) -> Path:
    """The file or folder that `path` names.

    Unless it exists, `gpt2` and the other sizes, `openai-community/NAME` and `hub:OWNER/NAME` are models on
    the hub: config.json and weights are downloaded into the hub's own cache; with `HF_HUB_OFFLINE=1` they
    must be there. Any other OWNER/NAME is taken for a mistyped path, which raises InputError.
    """
    if Path(path).exists():
        return Path(path)
    name = str(path).replace(os.sep, "/")
    if name in _SHORT_NAMES or name.startswith(("openai-community/", "hub:")):
        return _download(name.removeprefix("hub:"))
    raise InputError(f"no checkpoint at {path}, expected a file, a folder, gpt2 or hub:OWNER/NAME")


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    print(f"looking for {name} on the Hugging Face hub", file=sys.stderr)
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it logs a line for each of five attempts
    try:
        folder = Path(hf_hub_download(name, "config.json")).parent
        for weights in _WEIGHTS:
            try:
                found = Path(hf_hub_download(name, weights))
            except EntryNotFoundError:
                continue
            for shard in shard_names(found) if found.suffix == ".json" else []:
                hf_hub_download(name, shard)
            return folder
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"no file or folder {name}, and not available on the hub: {reason}") from None
    finally:
        logger.setLevel(level)
    raise InputError(f"{name} on the hub has none of {', '.join(_WEIGHTS)}")
