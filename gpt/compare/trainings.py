"""The trainings of a comparison: each is a run of `gpt fit` in a process of its own, made once.

A training's folder is named by a hash of all that decides it: the source, the options, the text, the steps
and the seed. So what is finished is not run again, what was killed resumes, and what was edited since is new.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cache, cached_property
from glob import escape, glob
from pathlib import Path
from typing import Any

from gpt.compare.variants import Variant, slug

_SOURCE_FILES = (".py", ".cpp", ".json")
_HASH = 10  # characters


@dataclass(frozen=True, eq=False)  # options are no key of a mapping
class Recipe:
    """A variant with all its options, as its own source understands them."""

    variant: Variant
    options: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        """A hash of the source and the options."""
        return digest(source_digest(self.variant.source), self.options)


@dataclass(frozen=True)
class Text:
    """A corpus as `gpt fit` names it, and options for runs on it."""

    name: str
    corpus: str
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, options: tuple[str, ...] = ()) -> "Text":
        """What a command line names: a file, folder, pattern, recipe or hub's name."""
        is_pattern = "://" not in name and any(mark in name for mark in "*?[")
        is_path = is_pattern or os.path.exists(name)
        return cls(Path(name).stem if is_path else name, os.path.abspath(name) if is_path else name, options)

    @cached_property
    def version(self) -> list[tuple[int, int]]:
        """The sizes and times of the files, if they are on this machine by name."""
        if not os.path.isabs(self.corpus):
            return []
        pattern = f"{escape(self.corpus)}/**" if os.path.isdir(self.corpus) else self.corpus
        names = [self.corpus] if os.path.isfile(self.corpus) else glob(pattern, recursive=True)
        found = [os.stat(name) for name in sorted(names) if os.path.isfile(name)]
        return [(stat.st_size, stat.st_mtime_ns) for stat in found]


@dataclass(frozen=True)
class Training:
    """One run."""

    recipe: Recipe
    text: Text
    seed: int
    steps: int

    @cached_property
    def name(self) -> str:
        """Of the run's folder."""
        text = self.text
        key = digest(self.recipe.digest, text.corpus, text.options, text.version, self.seed, self.steps)
        return "-".join(
            map(slug, (self.recipe.variant.name, text.name, str(self.steps), str(self.seed), key))
        )

    def words(self, config: Path) -> list[str]:
        """The command line of `gpt fit`; what a file must not name is given here."""
        weights = self.recipe.options["model"].get("init_from")
        return [
            *("fit", "--config", str(config), *self.text.options, "--data.corpus", self.text.corpus),
            *(() if weights is None else ("--model.init_from", weights)),
            *("--seed_everything", str(self.seed), "--trainer.max_steps", str(self.steps)),
            *("--trainer.max_epochs", "-1", "--trainer.max_time", "null", "--early_stopping", "null"),
            *("--snapshot_megabytes", "0", "--run", self.name, "--resume", "auto_or_new"),
        ]


def digest(*values: object) -> str:
    """A short hash of plain values."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH]


@cache
def source_digest(source: Path) -> str:
    """A hash of the package in this folder."""
    found = hashlib.sha256()
    for path in sorted((source / "gpt").rglob("*")):
        if path.suffix in _SOURCE_FILES and path.is_file():
            found.update(f"{path.relative_to(source).as_posix()}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()
