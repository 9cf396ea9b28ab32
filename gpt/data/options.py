"""The options of a run's text and batches. Nothing here imports Lightning, so `gpt fit --help` is fast."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from gpt.errors import InputError, check_least
from gpt.plain import Json
from gpt.text.template import DEFAULT_TEMPLATE, Template


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The options by which a corpus is read and divided; `gpt.data.prepare.prepare` describes each.

    None stands for what the corpus file says, or else for the default. Raises InputError for `most_bytes`
    below 1.
    """

    val_fraction: float | None = None
    most_bytes: int | None = None
    text_column: str | None = None
    skip_bad_rows: int | None = None
    template: Template = DEFAULT_TEMPLATE

    def __post_init__(self) -> None:
        check_least(1, most_bytes=self.most_bytes)

    @property
    def changed(self) -> list[str]:
        """The names of the options, besides the template, that have another value than by default."""
        names = [each.name for each in fields(self) if each.name != "template"]
        return [name for name in names if getattr(self, name) is not None]

    @classmethod
    def of(cls, options: Mapping[str, Json], prefix: str = "") -> "Reading":
        """Take the fields from options of their names, after a prefix. Other options are ignored."""
        given = {
            each.name: options[prefix + each.name] for each in fields(cls) if prefix + each.name in options
        }
        return cls(**given)


DEFAULT_READING = Reading()
"""All of a corpus, with the columns that it says and the default part held out."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The text that a run reads, and its batches. Raises InputError for a value out of its range."""

    corpus: str = "python-docs"
    """A text file, a folder, a pattern, a URL, a corpus file (.yaml), a prepared folder, a name of
    `data/`, or OWNER/NAME on the hub.
    Elsewhere: dataset, train_file, text, data, corpus."""
    batch_size: int = 12
    """Windows in a batch on each process. With `tokens_per_update`, the largest number allowed.
    Elsewhere: per_device_train_batch_size, train_batch_size."""
    tokens_per_update: int | None = None
    """Tokens in one optimizer step, over all processes. It sets how many batches are accumulated."""
    val_fraction: float | None = None
    """Fraction of the text to hold out. By default a tenth of a text of up to one megabyte; of a longer
    text, 100 times the square root of its bytes."""
    most_bytes: int | None = None
    """Read only about this many bytes of a longer text: parts from all of it, or its beginning where a file
    can only be read in order."""
    vocabulary: str | None = None
    """gpt2, gpt2:SIZE, learn, learn:SIZE, or a tokenizer.json file. By default GPT-2's tokens, as many as the
    model has. `quick`, `tinyshakespeare` and plans learn a vocabulary."""
    shift: bool = False
    """Cut the text into windows at another offset each epoch. Examples are not shifted."""
    bpe_dropout: float = 0.0
    """Share of the BPE merges that are skipped, at random each time (Provilkov et al. 2020). 0.05 helps where
    a model could memorise its text: docs/log/overfitting.md. Examples are not changed. Rare."""
    isolate: bool = False
    """Keep attention within a document, as within a conversation with all its turns. Rare."""
    text_column: str | None = None
    """The column of the text, or the columns of examples, as in `gpt prepare`. Rare."""
    skip_bad_rows: int | None = None
    """The most rows that cannot be used and may be left out; by default none. Rare."""
    template: Template = DEFAULT_TEMPLATE
    """The text around the messages of examples. Examples are packed into windows."""

    def __post_init__(self) -> None:
        check_least(1, batch_size=self.batch_size, tokens_per_update=self.tokens_per_update)
        if not 0 <= self.bpe_dropout <= 1:
            raise InputError(f"bpe_dropout must be in [0, 1], got {self.bpe_dropout}")

    @property
    def reading(self) -> Reading:
        """The options of reading and dividing the corpus."""
        return Reading.of(vars(self))
