"""The trainings of a comparison: each is a run of `gpt fit` in its own process, made only once.

The name of a training's folder has a hash of all that decides its result: the source, options, text, steps
and seed, and of files their sizes and times. So a finished training is not repeated, a killed one is resumed,
and an edited one is a new training.

Runs have another current folder than the command. So `Candidate.of` and `Text.of` make the paths of what is
here absolute. After them an absolute path names what is here; the hub or the package knows any other name.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cache, cached_property
from glob import escape, glob
from pathlib import Path

from gpt.compare.variants import Variant, slug
from gpt.data.find import named_corpus, shipped_corpora
from gpt.data.folders import is_pattern
from gpt.plain import JsonObject
from gpt.training.device import Precision, choose_precision

_SOURCE_FILES = (".py", ".cpp", ".json")
_HASH = 10  # characters of a hash in a name
_PATHS = (("data", "vocabulary"), ("model", "init_from"))  # options that may name a file


@dataclass(frozen=True, eq=False)  # options are a dict and cannot be hashed
class Candidate:
    """A variant with all its options, as its own source reads them."""

    variant: Variant
    options: JsonObject

    @classmethod
    def of(cls, variant: Variant, options: JsonObject) -> "Candidate":
        """Build the candidate with these options, which may name files of the current folder."""
        whole = dict(options)
        for room, name in _PATHS:
            value = options[room].get(name)
            if value is not None:
                whole[room] = {**whole[room], name: _whole_path(value)}
        return cls(variant, whole)

    @property
    def precision(self) -> Precision:
        """The precision of its runs, chosen once: each run's own timing could choose another."""
        trainer = self.options["trainer"]
        return choose_precision(trainer["accelerator"], trainer["precision"])

    @cached_property
    def digest(self) -> str:
        """A hash of the source and the options."""
        named = self.options["model"].get("init_from"), self.options["data"].get("vocabulary")
        changing = [stamps(name) for name in named if name is not None and os.path.isabs(name)]
        return digest(source_digest(self.variant.source), self.options, *changing)


@dataclass(frozen=True)
class Text:
    """A corpus as `gpt fit` names it, and options for runs on it."""

    name: str
    corpus: str
    options: tuple[str, ...] = ()
    corpus_file: Path | None = None
    """The corpus file that is meant, if one is: one on this machine, or one of the package by its name."""
    files: tuple[str, ...] = ()
    """The files that the corpus file names."""
    names_relative_files: bool = False
    """Whether the corpus file names some of them by relative paths, which runs would not find."""

    @classmethod
    def of(cls, name: str, options: tuple[str, ...] = ()) -> "Text":
        """Build the text that a command line names: a file, folder, pattern, corpus file or hub name.

        Raises the errors of `named_corpus` for a corpus file.
        """
        is_path = os.path.exists(name) or (is_pattern(name) and "://" not in name)
        label = Path(name).stem if is_path else name
        corpus = os.path.abspath(name) if is_path else name
        corpus_file = Path(corpus) if is_path else shipped_corpora().get(name)
        if corpus_file is None or corpus_file.suffix != ".yaml" or not corpus_file.is_file():
            return cls(label, corpus, options)
        named = named_corpus(str(corpus_file)).files
        files = tuple(map(_whole_path, named))
        return cls(label, corpus, options, corpus_file, files, files != named)

    @cached_property
    def version(self) -> list[object]:
        """Sizes and modification times of the files on this machine, and the content of a corpus file."""
        if self.corpus_file:
            stamps_of_files = [stamp for file in self.files if os.path.isabs(file) for stamp in stamps(file)]
            return [self.corpus_file.read_text(encoding="utf-8"), *stamps_of_files]
        return [*stamps(self.corpus)] if os.path.isabs(self.corpus) else []


@dataclass(frozen=True)
class Training:
    """One run: a candidate on a text, with a seed and a number of steps."""

    candidate: Candidate
    text: Text
    seed: int
    steps: int

    @cached_property
    def name(self) -> str:
        """The name of the run's folder."""
        text = self.text
        key = digest(self.candidate.digest, text.corpus, text.options, text.version, self.seed, self.steps)
        return "-".join(
            map(slug, (self.candidate.variant.name, text.name, str(self.steps), str(self.seed), key))
        )

    def words(self, config: Path, corpus: str) -> list[str]:
        """Return the command line of `gpt fit`, with the options that a config file may not set."""
        weights = self.candidate.options["model"].get("init_from")
        return [
            *("fit", "--config", str(config), *self.text.options, "--data.corpus", corpus),
            *(() if weights is None else ("--model.init_from", weights)),
            *("--seed_everything", str(self.seed), "--trainer.max_steps", str(self.steps)),
            *("--trainer.precision", self.candidate.precision),
            *("--trainer.max_epochs", "-1", "--trainer.max_time", "null", "--early_stopping", "null"),
            *("--snapshot_megabytes", "0", "--run", self.name, "--resume", "auto_or_new"),
        ]


def _whole_path(name: str) -> str:
    """Return the absolute path of a file or folder that exists, and any other name unchanged."""
    return os.path.abspath(name) if os.path.exists(name) else name


def stamps(name: str) -> list[tuple[int, int]]:
    """Return the sizes and modification times of a file, or of all files of a folder or a pattern."""
    pattern = f"{escape(name)}/**" if os.path.isdir(name) else name
    names = [name] if os.path.isfile(name) else glob(pattern, recursive=True)
    stats = [os.stat(file) for file in sorted(names) if os.path.isfile(file)]
    return [(stat.st_size, stat.st_mtime_ns) for stat in stats]


def digest(*values: object) -> str:
    """Return a short hash of plain values."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH]


@cache
def source_digest(source: Path) -> str:
    """Return a hash of the package in this folder."""
    digest = hashlib.sha256()
    for path in sorted((source / "gpt").rglob("*")):
        if path.suffix in _SOURCE_FILES and path.is_file():
            digest.update(f"{path.relative_to(source).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
