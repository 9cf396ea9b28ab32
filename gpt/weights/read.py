"""From a path or a hub's name to a GPT's configuration and weights, whichever program wrote them."""

import logging
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.template import Template
from gpt.tokenizer import Tokenizer
from gpt.vocabulary import read_table
from gpt.weights.adapters import with_base
from gpt.weights.formats import book, hf, nanogpt
from gpt.weights.formats.table import Weights
from gpt.weights.tensors import load_pickle, read_json, read_tensors, shard_names, strip_prefixes

Format = Literal["gpt", "hf", "nanogpt", "book"]
_SHORT_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


@dataclass(frozen=True)
class Found:
    """Weights by a GPT's names, and the format they were stored in; this project's own is `gpt`."""

    format: Format
    config: GPTConfig
    weights: Weights
    own_tokenizer: Tokenizer | None = None  # where the weights come with one that is not GPT-2's
    bytes_per_token: float | None = None  # of the text that the weights were trained on, where known
    template: Template | None = None  # of the examples that they were trained on

    def __post_init__(self) -> None:
        if self.own_tokenizer and self.vocab_size > self.config.vocab_size:
            rows = f"{self.config.vocab_size} rows"
            raise InputError(f"the tokenizer has {self.vocab_size} ids, but the weights have {rows}")

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer; the rows past them are padding."""
        return (self.own_tokenizer or Tokenizer()).n_vocab

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the weights; InputError where they have fewer rows than any has ids."""
        return self.own_tokenizer or Tokenizer(vocab_size=min(self.config.vocab_size, self.vocab_size))


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


def read_weights(path: str | os.PathLike[str], num_heads: int | None = None) -> Found:
    """Read what `GPT.from_pretrained` takes, with its errors; the book's state dicts lack `num_heads`."""
    path = locate(path)
    if path.suffix == ".safetensors" and (path.parent / "config.json").is_file():
        path = path.parent
    if not (path / "config.json").is_file() and (path / "ckpt.pt").is_file():
        path = path / "ckpt.pt"  # nanoGPT's out_dir
    if not path.is_dir() and not path.is_file():  # a device or a pipe may never end
        raise InputError(f"{path} is neither a file nor a folder")
    try:
        found = _read_folder(path, num_heads) if path.is_dir() else _read_file(path, num_heads)
        beside = (path if path.is_dir() else path.parent) / "tokenizer.json"
        if found.own_tokenizer is None and beside.is_file():
            return replace(found, own_tokenizer=_own(Tokenizer.from_table(*read_table(beside))))
        return found
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        # A text in place of a number, a list in place of a mapping, ...
        raise InputError(f"{path}: its settings are not a GPT-2's") from error


def crop(
    config: GPTConfig, weights: Weights, vocab_size: int | None = None, context_length: int | None = None
) -> tuple[GPTConfig, Weights]:
    """Keep at most `vocab_size` rows of the token embedding and the head, and `context_length` positions.

    A context_length of more positions than the weights have raises InputError.
    """
    tokens = min(vocab_size or config.vocab_size, config.vocab_size)
    positions = config.context_length if context_length is None else context_length
    if positions > config.context_length:
        there = f"the weights' {config.context_length} positions"
        raise InputError(f"context_length {positions} is more than {there}")
    kept = {"token_embedding.weight": tokens, "head.weight": tokens, "position_embedding.weight": positions}
    cropped = {name: tensor[: kept[name]] if name in kept else tensor for name, tensor in weights.items()}
    return replace(config, vocab_size=tokens, context_length=positions), cropped


def _read_folder(folder: Path, num_heads: int | None) -> Found:
    if not (folder / "config.json").is_file():
        raise InputError("config.json is missing, expected a folder of GPT-2 weights")
    values = read_json(folder / "config.json")
    if "model_type" not in values and "n_heads" in values:
        return Found("book", *book.read(read_tensors(folder), values, num_heads))
    if values.get("model_type") == "minimal-gpt":
        del values["model_type"]
        return Found("gpt", GPTConfig.from_dict(values), read_tensors(folder))
    config = hf.read_config(values)
    return Found("hf", config, hf.import_weights(config, read_tensors(folder)))


def _read_file(path: Path, num_heads: int | None) -> Found:
    saved = load_pickle(path)
    if not isinstance(saved, dict):
        raise InputError(f"expected a dictionary of tensors, got {type(saved).__name__}")
    if "gpt" in saved and "state_dict" in saved:
        part, state = saved["gpt"], strip_prefixes(saved["state_dict"], "model.")
        own = _own(Tokenizer.from_dict(part["tokenizer"])) if part.get("tokenizer") else None
        config = GPTConfig.from_dict(part["config"])
        weights = with_base(path, config, saved.get("adapters"), state)
        template = Template.from_dict(part["template"]) if part.get("template") else None
        return Found("gpt", config, weights, own, part.get("bytes_per_token"), template)
    if "model_args" in saved and "model" in saved:
        return Found("nanogpt", *nanogpt.read(saved))
    state = strip_prefixes(saved.get("model_state_dict", saved))
    if not any(name.startswith(("tok_emb.", "trf_blocks.")) for name in state):
        raise InputError("expected a checkpoint of gpt fit or of nanoGPT, or the book's state dict")
    beside = path.parent / "config.json"
    values = read_json(beside) if beside.is_file() else {}
    return Found("book", *book.read(state, values, num_heads))


def _own(tokenizer: Tokenizer) -> Tokenizer | None:
    return None if tokenizer.name == "gpt2" else tokenizer
