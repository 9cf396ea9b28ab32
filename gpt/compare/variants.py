"""Parse a command line into the variants to compare, the base first."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path

from gpt.command_line import values_in
from gpt.data.options import Reading
from gpt.errors import InputError
from gpt.plain import shown

BETWEEN = "vs"
OUR_SOURCE = Path(__file__).resolve().parents[2]
"""The folder that holds the running package."""
_LONGEST_NAME = 60  # bytes in UTF-8; a folder's name joins several, and may have 255
HELD_OUT = tuple(field.name for field in fields(Reading))
"""Options of `data` that decide which text is held out. Scores on different texts cannot be compared."""
_USUAL_CONFIG = ("--config", "quick")  # without a config `gpt fit` would plan for a time
# Options that all variants share, and what the error says.
_SHARED = {
    "data.corpus": "all variants read the same texts: name them with --texts",
    "trainer.max_steps": "all variants make the same steps: give --steps",
    "trainer.max_epochs": "all variants make the same steps: give --steps",
    "trainer.max_time": "all variants make the same steps: give --steps",
    "minutes": "all variants make the same steps: give --steps",
    "early_stopping": "all variants make the same steps: leave it out",
    "seed_everything": "all variants have the same seeds: give --seeds and --first_seed",
    "run": "runs are named by what they are: give the comparison a --name",
    "resume": "the same command resumes: leave it out",
    "ckpt_path": "nothing is validated: leave it out",
    "print_config": "the variants' options are written into the comparison's folder: leave it out",
}


@dataclass(frozen=True)
class Variant:
    """One way to train: words for `gpt fit`, and the folder with the source that runs them."""

    name: str
    words: tuple[str, ...]
    source: Path = OUR_SOURCE


@dataclass(frozen=True)
class Part:
    """The words between two `vs`: at most one config, recipe or folder, then options."""

    word: str | None
    options: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> "Part":
        """Parse the words of a part.

        Raises InputError for more than one word before the options, and for options that all variants share.
        """
        names = list(takewhile(lambda word: not word.startswith("-"), words))
        if len(names) > 1:
            raise InputError(f"{names[0]} {names[1]}: write '{names[0]} {BETWEEN} {names[1]}'")
        options = tuple(words[len(names) :])
        for name, _ in values_in(options):
            if name in _SHARED:
                raise InputError(f"--{name}: {_SHARED[name]}")
        return cls(names[0] if names else None, options)

    @property
    def source(self) -> Path | None:
        """The folder with an edited copy of the package, if named; InputError for a folder without one."""
        if self.word is None or not os.path.isdir(self.word):
            return None
        folder = Path(self.word).resolve()
        if not (folder / "gpt" / "__init__.py").is_file():
            raise InputError(
                f"{self.word} has no gpt/__init__.py: expected the folder that holds the package gpt"
            )
        return folder

    @property
    def config(self) -> tuple[str, ...]:
        """The option that names the config or recipe, if there is one."""
        return () if self.word is None or self.source else ("--config", self.word)

    @property
    def name(self) -> str:
        """The name of the file, recipe or folder, then the options by the last parts of their names."""
        settings = [
            name.rpartition(".")[2] if value is None else f"{name.rpartition('.')[2]}={value}"
            for name, value in values_in(self.options)
        ]
        if self.word is None:
            return " ".join(settings)
        stem = Path(self.word).resolve().name if self.source else Path(self.word).stem
        return " ".join([stem, *settings])


def parse_variants(words: Sequence[str]) -> tuple[Variant, ...]:
    """Return the variants of a command line, the base first; see `gpt compare --help`.

    The base's options apply to all variants. A variant's own config or folder replaces the base's.
    """
    if given := next((word for word in words if word.partition("=")[0] in ("-c", "--config")), None):
        raise InputError(f"{given}: name the config by a word before the options: gpt compare CONFIG ...")
    base, *others = map(Part.of, split(words))
    for part in others:
        for name, _ in values_in(part.options):
            if name.startswith(tuple(f"data.{held_out}" for held_out in HELD_OUT)):
                how = f"give it before the first '{BETWEEN}'"
                raise InputError(f"--{name}: all variants are scored on the same held-out text: {how}")
    config = base.config or _USUAL_CONFIG
    variants = [Variant(base.name or "quick", (*config, *base.options), base.source or OUR_SOURCE)]
    for part in others:
        chosen = (*(part.config or config), *base.options, *part.options)
        variants.append(Variant(part.name, chosen, part.source or variants[0].source))
    names = [variant.name for variant in variants]
    if twice := next((name for name in names if names.count(name) > 1), None):
        one, other, *_ = (variant for variant in variants if variant.name == twice)
        if one == other:
            raise InputError(f"two variants are {shown(twice)}: expected variants that differ")
        how = "give one of them a config or folder of another name"
        raise InputError(f"two variants differ, and both are called {shown(twice)}: {how}")
    return tuple(variants)


def split(words: Sequence[str]) -> list[list[str]]:
    """Split words at `vs` into at least two parts.

    Without `vs`, each word is a part, or the options are the second part.
    """
    parts: list[list[str]] = [[]]
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    options = list(words[len(names) :])
    if BETWEEN in words:
        for word in words:
            if word == BETWEEN:
                parts.append([])
            else:
                parts[-1].append(word)
    elif options and len(names) <= 1:
        parts = [names, options]
    elif options:
        raise InputError(f"write '{BETWEEN}' between variants: {names[0]} {BETWEEN} {names[1]} ...")
    else:
        parts = [[name] for name in names]
    if len(parts) < 2:
        raise InputError("name two variants or more: gpt compare quick --model.optimizer.lr 3e-3")
    if not all(parts[1:]):
        raise InputError(f"nothing stands after a '{BETWEEN}': expected a config, a folder or options")
    return parts


def slug(name: str) -> str:
    """Return a name that can be a folder's."""
    plain = re.sub(r"[^\w.=-]+", "-", name).strip("-.")
    cut = plain.encode("utf-8", "replace")[:_LONGEST_NAME]
    return cut.decode("utf-8", "ignore") or "x"  # without half a character at the end
