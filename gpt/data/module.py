"""The LightningDataModule: a corpus becomes prepared files once, and its windows become batches."""

import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from gpt.data.prepare import prepare_for
from gpt.data.shards import Prepared
from gpt.data.windows import Batch, EvalWindows, Grid, Packed, TrainWindows
from gpt.errors import InputError, check_least
from gpt.text.template import DEFAULT_TEMPLATE, Template
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import find_vocabulary


class TokenData(pl.LightningDataModule):
    """Batches of token windows from any corpus. Give the Trainer `use_distributed_sampler=False`.

    Args:
        corpus: a recipe's name, a text file, a folder, a pattern, `hub:OWNER/NAME`, or a prepared folder.
        vocab_size: size of the vocabulary; GPT-2's whole one has 50257.
        context_length: tokens in a window.
        batch_size: windows in a batch, on each process; with `tokens_per_update`, at most so many.
        tokens_per_update: tokens of an update, over all processes and accumulated batches. It decides how
            many batches are accumulated, and makes the Trainer's `val_check_interval` count updates. None
            leaves both to the Trainer's options.
        val_fraction: fraction of the text to hold out; by default a tenth of a text up to a megabyte, of a
            longer one 100 times the root of its bytes.
        most_bytes: of a longer text, read parts of all of it, of about so many bytes together.
        seed: selects the order of the windows.
        shift: cut the text, unless it is examples, at another offset each epoch.
        pack: end windows where documents end, so that no document shorter than the context is split; the rest
            of a window is padding, which is not scored.
        isolate: keep attention within a document: batches get a third tensor with each token's document.
        num_workers: processes that read batches; 0 is fast enough from a local disk.
        text_column: the column of the text or the columns of examples, see `gpt prepare --help`.
        vocabulary: gpt2, gpt2:SIZE, learn, learn:SIZE, learn:SIZE:marks, learn:chars, or a .tiktoken or
            tokenizer.json file, see `gpt prepare --help`; by default GPT-2's with `vocab_size` ids.
        errors: `strict` stops at bytes that are not UTF-8, `replace` puts U+FFFD in their place.
        template: the text around the messages of examples, which are packed.
    """

    def __init__(
        self,
        corpus: str = "python-docs",
        vocab_size: int = 2048,
        context_length: int = 128,
        batch_size: int = 12,
        tokens_per_update: int | None = None,
        val_fraction: float | None = None,
        most_bytes: int | None = None,
        seed: int = 0,
        shift: bool = False,
        pack: bool = False,
        isolate: bool = False,
        num_workers: int = 0,
        text_column: str | None = None,
        errors: str | None = None,
        vocabulary: str | None = None,
        template: Template = DEFAULT_TEMPLATE,
    ) -> None:
        super().__init__()
        check_least(1, batch_size=batch_size, context_length=context_length)
        check_least(0, num_workers=num_workers)
        if tokens_per_update is not None and (tokens_per_update < 1 or tokens_per_update % context_length):
            fitting = max(1, round(tokens_per_update / context_length)) * context_length
            raise InputError(
                f"tokens_per_update {tokens_per_update} is no whole number of windows of {context_length} "
                f"tokens: give {fitting}"
            )
        if shift and pack:
            raise InputError("shift and pack cannot go together: packed windows begin where documents do")
        self.corpus, self.vocabulary = corpus, find_vocabulary(vocabulary, vocab_size)
        self.context_length, self.batch_size, self.seed = context_length, batch_size, seed
        self.shift, self.pack, self.isolate, self.num_workers = shift, pack, isolate, num_workers
        self.tokens_per_update = tokens_per_update
        self._divided_for: Any = None  # the Trainer that `split_update` has set
        self._options: dict[str, Any] = {"val_fraction": val_fraction, "most_bytes": most_bytes}
        self._options |= {"by_size": vocabulary is None}
        self._options |= {"text_column": text_column, "errors": errors, "template": template}

    @cached_property
    def prepared(self) -> Prepared:
        """The files on disk, prepared on first use; checksums would take longer than the first steps."""
        prepared = Prepared(prepare_for(self.vocabulary, self.corpus, verify=False, **self._options))
        prepared.check_examples(self.context_length, self.isolate)
        return prepared

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the prepared files."""
        return self.prepared.tokenizer

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of the training text for each of its tokens."""
        return self.prepared.count("train", "bytes") / max(1, self.prepared.count("train", "tokens"))

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        """UTF-8 bytes of text that each id stands for, (n_vocab,)."""
        return self.tokenizer.byte_lengths()

    def use(self, tokenizer: Tokenizer) -> None:
        """Encode with this tokenizer, whatever the options are."""
        self.vocabulary, self._options["by_size"] = tokenizer, False
        for name in ("prepared", "byte_lengths"):
            self.__dict__.pop(name, None)

    def prepare_data(self) -> None:
        """Tokenize the corpus, on one process of each machine, unless it is prepared already."""
        _ = self.prepared  # kept: hashing the corpus again for `setup` would read it whole

    def setup(self, stage: str) -> None:
        """Open the prepared files on every process, and divide an update into batches."""
        _ = self.prepared
        if stage == "fit" and self.trainer is not None and self.tokens_per_update is not None:
            self.split_update(self.batch_size)

    def split_update(self, most: int) -> None:
        """Divide `tokens_per_update` over processes and batches of equal size, of at most `most` windows.

        Sets `batch_size`, and the Trainer's accumulate_grad_batches and val_check_interval.
        """
        trainer: Any = self.trainer
        assert self.tokens_per_update is not None
        if self._divided_for is not trainer and trainer.accumulate_grad_batches != 1:
            raise InputError("tokens_per_update decides accumulate_grad_batches: give only one of them")
        self._divided_for = trainer
        windows, processes = self.tokens_per_update // self.context_length, trainer.world_size
        share, left = divmod(windows, processes)
        if left:
            raise InputError(
                f"tokens_per_update {self.tokens_per_update} makes {windows} windows, which {processes} "
                f"processes cannot share equally: give {(share + 1) * processes * self.context_length}"
            )
        self.batch_size = max(size for size in range(1, min(most, share) + 1) if share % size == 0)
        accumulate, limit = share // self.batch_size, trainer.limit_train_batches
        if limit % accumulate if isinstance(limit, int) else limit != 1.0:
            raise InputError("limit_train_batches would cut the updates of tokens_per_update: give max_steps")
        if isinstance(trainer.val_check_interval, int):  # given in updates; Lightning counts batches
            trainer.val_check_interval //= trainer.accumulate_grad_batches
            trainer.val_check_interval *= accumulate
        trainer.accumulate_grad_batches = accumulate

    def train_dataloader(self) -> "TrainLoader":
        """(x, y) of (B, T) int64, y one token ahead of x; with `isolate` document ids too."""
        stream, length = self.prepared.stream("train"), self.context_length
        windows: Grid | Packed = Grid(len(stream), length, self.seed, self.shift)
        if self.pack or self.prepared.template:
            scored = stream.scored() if self.prepared.template else None
            windows = Packed(self.prepared.document_starts("train"), len(stream), length, scored)
        dataset = TrainWindows(stream, windows, self.batch_size, self.seed, *self._place(), self.isolate)
        accumulate = self.trainer.accumulate_grad_batches if self.trainer else 1
        return TrainLoader(dataset, self.num_workers, multiple_of=accumulate)

    def val_dataloader(self) -> "DataLoader[Batch]":
        """The whole split once, in order: padding has the target IGNORE_INDEX."""
        stream, place = self.prepared.stream("val"), self._place()
        starts = self.prepared.document_starts("val") if self.prepared.template else None
        dataset = EvalWindows(stream, self.context_length, self.batch_size, *place, self.isolate, starts)
        return DataLoader(dataset, **_loading())

    def _place(self) -> tuple[int, int]:
        """This process among those that train together, and their number."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)


class TrainLoader(DataLoader[Batch]):
    """Batches of consecutive numbers: each iteration continues where the last one stopped.

    Lightning saves its state with a checkpoint. An epoch's batches are rounded up to a multiple of
    `multiple_of`, so that all updates accumulate equally many.
    """

    def __init__(self, dataset: TrainWindows, num_workers: int = 0, multiple_of: int = 1) -> None:
        self._numbers = _Consecutive(math.ceil(len(dataset) / multiple_of) * multiple_of)
        self._windows_per_batch = dataset.batch_size * dataset.world_size
        super().__init__(dataset, sampler=self._numbers, **_loading(num_workers))

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        for batch in super().__iter__():
            self._numbers.next += 1  # not when the number is drawn: workers draw some batches ahead
            yield batch

    def state_dict(self) -> dict[str, int]:
        """The windows that all processes have taken."""
        return {"windows": self._numbers.next * self._windows_per_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the windows that `state_dict` counted, with another batch size too."""
        self._numbers.next = state["windows"] // self._windows_per_batch


@dataclass
class _Consecutive(Sampler[int]):
    """The numbers of an epoch's batches, from `next` on."""

    count: int
    next: int = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.next, self.next + self.count))


def _loading(num_workers: int = 0) -> dict[str, Any]:
    """Options of a DataLoader of whole batches."""
    return {
        "batch_size": None,
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "worker_init_fn": _ignore_signals,
        "pin_memory": torch.cuda.is_available(),
        "generator": torch.Generator(),  # the default is the global one, which dropout uses
    }


def _ignore_signals(worker: int) -> None:
    """A terminal's Ctrl-C reaches every process; the one that trains needs batches to finish its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
