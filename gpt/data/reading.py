"""The options of reading a corpus."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from gpt.errors import check_least
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
