"""What the checks of `scripts/guests.py` share: the model, its exports, its server, the expected text."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from benchmarks.common import listening

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.generation import Sampling, stream_samples
from gpt.serve.app import create_app
from gpt.weights.commands import FolderFormat, write_export
from gpt.weights.load import StoredModel

PROMPT = "The quick brown fox jumps over"
NEW = 24
"""Tokens that are generated for a comparison."""


@dataclass(frozen=True)
class Guest:
    """A check of one program, which raises where the program gives something else.

    Args:
        packages: the distributions that it needs, of which the first is the program.
        what: what is compared with what.
        check: compares.
    """

    packages: tuple[str, ...]
    what: str
    check: Callable[["Place"], None]


GUESTS: list[Guest] = []


def guest(*packages: str) -> Callable[[Callable[["Place"], None]], None]:
    """Adds a function to the checks; its docstring says what is compared."""

    def add(check: Callable[["Place"], None]) -> None:
        GUESTS.append(Guest(packages, (check.__doc__ or "").rstrip("."), check))

    return add


@dataclass
class Place:
    """A folder with a model, what was made from it, and the address of its server."""

    folder: Path
    address: str
    tokenizer: Tokenizer

    @property
    def model(self) -> GPT:
        """A new copy of the model, so that a check may change it."""
        return new_model()

    @cached_property
    def prompt(self) -> list[int]:
        """The ids of PROMPT."""
        return self.tokenizer.encode(PROMPT)

    @cached_property
    def new_ids(self) -> list[int]:
        """The greedy ids after PROMPT."""
        return greedy(self.model, self.prompt)

    @cached_property
    def text(self) -> str:
        """The greedy text after PROMPT as a typed text, whose last word may be cut into other tokens."""
        greedy = Sampling(temperature=0)
        pieces = stream_samples(self.model, self.tokenizer, PROMPT, sampling=greedy, max_new_tokens=NEW)
        return "".join(piece for _, piece in pieces)

    def export(self, form: FolderFormat) -> Path:
        """The folder of an export, which is written once."""
        folder = self.folder / form
        if not folder.exists():
            model = self.model
            write_export(StoredModel("gpt", model.config, model.state_dict()), folder, form)
        return folder


def new_model() -> GPT:
    """A GPT with large random weights: its likeliest token depends on all it sees."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=2048, context_length=128, emb_dim=64, num_heads=4, num_layers=2)
    model = GPT(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "position" not in name:
                parameter.normal_(std=0.15)
    return model


@contextmanager
def make_place(folder: Path) -> Iterator[Place]:
    """Serve the model while the checks run."""
    tokenizer = Tokenizer("gpt2", vocab_size=2048)
    with listening(create_app(new_model(), tokenizer, name="tiny"), log_level="critical") as address:
        yield Place(folder, address, tokenizer)


def greedy(model: GPT, ids: list[int]) -> list[int]:
    """The ids that `generate` adds."""
    return list(generate(model, [ids], max_new_tokens=NEW, temperature=0)[0][len(ids) :])


@contextmanager
def refused(error: type[Exception], part: str = "") -> Iterator[None]:
    """Raise AssertionError unless the block raises this error, with this part in its text."""
    try:
        yield
    except error as raised:
        equal(True, part in str(raised))
    else:
        raise AssertionError(f"there is no {error.__name__}")


def equal(ours: object, theirs: object) -> None:
    """Raise AssertionError with both values if they differ."""
    if ours != theirs:
        raise AssertionError(f"gpt gives {str(ours)[:60]!r}, the program {str(theirs)[:60]!r}")


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Raise AssertionError with the largest difference if it is over the tolerance."""
    difference = (ours.float() - theirs.float()).abs().max().item()
    if not difference <= tolerance:
        raise AssertionError(f"the largest difference is {difference:.2e}, {tolerance:.0e} is allowed")
