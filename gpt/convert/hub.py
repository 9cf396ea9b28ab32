"""Where weights are: a path, or a model of the Hugging Face hub, which is downloaded once and then kept."""

import os
import re
from pathlib import Path

from gpt.convert.tensors import shard_names
from gpt.errors import InputError

_SHORT_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


def locate(path: str | os.PathLike[str]) -> Path:
    """The file or folder that `path` means.

    What exists is taken as it is. Else `gpt2` and the other sizes, `OWNER/NAME` and `hub:OWNER/NAME` are
    models of the hub, whose config.json and weights are fetched into its own cache; with `HF_HUB_OFFLINE=1`
    the cache must have them.

    Raises:
        InputError: there is nothing of that name, or the hub cannot be reached.
    """
    name = str(path)
    if Path(path).exists():
        return Path(path)
    explicit = name.startswith("hub:")
    name = name.removeprefix("hub:").replace(os.sep, "/")
    # A mistyped path below a folder that is there is not worth a look at the network.
    looks_like_one = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not Path(name).parent.exists()
    if not (explicit or name in _SHORT_NAMES or looks_like_one):
        raise InputError(f"no checkpoint at {path}, expected a file, a folder or a hub name such as gpt2")
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    try:
        folder = Path(hf_hub_download(name, "config.json")).parent
        for weights in _WEIGHTS:
            try:
                found = Path(hf_hub_download(name, weights))
            except EntryNotFoundError:
                continue
            if found.suffix == ".json":
                for shard in shard_names(found):
                    hf_hub_download(name, shard)
            return folder
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"no file or folder {name}, and none from the hub: {reason}") from None
    raise InputError(f"the hub's {name} has none of {', '.join(_WEIGHTS)}")
