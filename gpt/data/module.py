"""The LightningDataModule. It prepares a corpus once, and makes batches of its windows."""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from gpt.data.options import DataOptions
from gpt.data.prepare import prepare_named, prepare_text
from gpt.data.prepared import Prepared
from gpt.data.respelling import Respelling
from gpt.data.split import Divided
from gpt.data.stored import is_scored
from gpt.data.windows import Batch, EvalWindows, Grid, Packed, TrainWindows, WeightedBatch
from gpt.errors import InputError, check_least
from gpt.text.tokenizer import Tokenizer
from gpt.text.vocabulary import find_vocabulary


class _Processes(NamedTuple):
    """How the processes of a Trainer share an update."""

    rank: int = 0  # of this process
    world_size: int = 1
    batches_per_update: int = 1  # of each process


class TokenData(pl.LightningDataModule):
    """Batches of token windows from any corpus. Give the Trainer `use_distributed_sampler=False`.

    Args:
        corpus: see `DataOptions`.
        vocab_size: size of the vocabulary if no `vocabulary` is named. GPT-2's full one has 50257 tokens.
        context_length: tokens in a window.
        seed: determines the order of the windows.
        tokenizer: encodes the text instead of the vocabulary.
        text: the corpus, if it was divided or prepared before with these options.
        options: the other fields of `DataOptions`.
    """

    def __init__(
        self,
        corpus: str = DataOptions.corpus,
        vocab_size: int = 2048,
        context_length: int = 128,
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
        text: Divided | Prepared | None = None,
        **options: Any,  # each has the type of its field
    ) -> None:
        super().__init__()
        self.options = DataOptions(corpus=corpus, **options)
        check_least(1, context_length=context_length)
        self.vocabulary = tokenizer or find_vocabulary(self.options.vocabulary, vocab_size)
        self._text = text
        self.context_length = context_length
        self.batch_size = self.options.batch_size
        self.seed = seed
        self.place = 0
        """Windows that all processes together have read before training begins."""

    @cached_property
    def prepared(self) -> Prepared:
        """The prepared folder. It is made on first use."""
        if self._text is None:
            prepared = prepare_named(self.options.corpus, self.vocabulary, self.options.reading)
        else:
            prepared = prepare_text(self._text, self.vocabulary)
            self._text = None  # it may be large, and is no longer needed
        prepared.check_examples(self.context_length)
        return prepared

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the prepared files."""
        return self.prepared.tokenizer

    def setup(self, stage: str) -> None:
        """Tokenize the corpus, unless this was done before. Divide an update into batches.

        Raises InputError if the Trainer accumulates another number of batches than `tokens_per_update` needs.
        """
        _ = self.prepared
        trainer = self.trainer
        if stage == "fit" and trainer is not None and self.options.tokens_per_update is not None:
            self.batch_size, batches = divide_update(self.options, self.context_length, trainer.world_size)
            if trainer.accumulate_grad_batches != batches:
                what = f"tokens_per_update {self.options.tokens_per_update} makes {batches} batches an update"
                raise InputError(f"{what}: give the Trainer accumulate_grad_batches={batches}")

    @property
    def windows_per_update(self) -> int:
        """Windows that all processes together read in one update."""
        processes = self._processes()
        return self.batch_size * processes.world_size * processes.batches_per_update

    @property
    def windows_per_epoch(self) -> int:
        """Windows of the training text."""
        return self._train_windows.count

    @property
    def updates_per_epoch(self) -> int:
        """Updates in one epoch, rounded up. The Trainer must be known."""
        return self.train_dataloader().updates_per_epoch

    @cached_property
    def _train_windows(self) -> Grid | Packed:
        """The windows of the training text; InputError if it is shorter than one, or nothing is scored."""
        stream = self.prepared.stream("train")
        length = self.context_length
        if len(stream) < length:
            raise InputError(
                f"the training text has {len(stream)} tokens, fewer than the context_length of {length}: "
                "give more text or a smaller context_length"
            )
        if stream.example_starts is None:
            return Grid(len(stream), length, self.seed, self.options.shift)
        windows = Packed(stream.example_starts, len(stream), length, is_scored(stream.tokens))
        if not windows.count:  # `gpt prepare` leaves such examples out
            raise InputError("no token of the training text is scored: prepare it again")
        return windows

    def train_dataloader(self) -> "TrainLoader":
        """Return batches (x, y), (B, T) int64 each, in which y is one token ahead of x.

        With `isolate`, document ids follow. Raises InputError if the training text is shorter than a window.
        """
        windows = self._train_windows
        respelling = None
        if self.options.bpe_dropout and isinstance(windows, Grid):  # examples are not changed
            respelling = Respelling(self.options.bpe_dropout, self.tokenizer, self.seed)
        processes = self._processes()
        dataset = TrainWindows(
            self.prepared.stream("train"),
            windows,
            self.batch_size,
            seed=self.seed,
            rank=processes.rank,
            world_size=processes.world_size,
            isolate=self.options.isolate,
            respelling=respelling,
        )
        return TrainLoader(dataset, processes.batches_per_update, self.place, pin_memory=self._on_cuda())

    def val_dataloader(self) -> EvalWindows:
        """Return the whole held-out split once, in order. The target of padding is IGNORE_INDEX."""
        processes = self._processes()
        return EvalWindows(
            self.prepared.stream("val"),
            self.context_length,
            self.batch_size,
            rank=processes.rank,
            world_size=processes.world_size,
            isolate=self.options.isolate,
        )

    def _processes(self) -> _Processes:
        trainer = self.trainer
        if trainer is None:
            return _Processes()
        return _Processes(trainer.global_rank, trainer.world_size, trainer.accumulate_grad_batches)

    def _on_cuda(self) -> bool:
        """Whether this process trains on a GPU. A GPU can copy pinned batches while it computes."""
        trainer = self.trainer
        return trainer is not None and trainer.strategy.root_device.type == "cuda"


def divide_update(options: DataOptions, context_length: int, world_size: int) -> tuple[int, int]:
    """Divide the `tokens_per_update` into equal batches on all processes, of at most `batch_size` windows.

    Return the windows in a batch, and the batches of each process in an update. Raises InputError if the
    processes cannot share the tokens in whole windows.
    """
    wanted = options.tokens_per_update or 0
    equal = context_length * world_size
    share, left = divmod(wanted, equal)  # windows of each process
    if left or not share:
        what = f"tokens_per_update {wanted} is no multiple of {equal}, a window on each process"
        raise InputError(f"{what}: give {max(1, round(wanted / equal)) * equal}")
    most = min(options.batch_size, share)
    batch_size = max(size for size in range(1, most + 1) if share % size == 0)
    return batch_size, share // batch_size


class TrainLoader:
    """A loader of batch after batch. Each iteration continues where the last one stopped.

    It begins after `place` windows. The batches of an epoch are rounded up to whole updates, so that all
    updates accumulate the same number. If an update has several batches of examples, each batch comes with
    its weight in their mean. The Trainer saves the loader's state to resume within an epoch.
    """

    def __init__(
        self,
        dataset: TrainWindows,
        batches_per_update: int = 1,
        place: int = 0,
        *,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batches_per_update = batches_per_update
        self.updates_per_epoch = math.ceil(len(dataset) / batches_per_update)
        self._pin_memory = pin_memory
        self._windows_per_batch = dataset.batch_size * dataset.world_size  # of all processes
        self.load_state_dict({"windows": place})

    def __len__(self) -> int:
        """Return the number of batches of an epoch on each process."""
        return self.updates_per_epoch * self.batches_per_update

    def __iter__(self) -> Iterator[Batch | WeightedBatch]:
        for _ in range(self.updates_per_epoch):
            weights = self._weights()
            for number in range(self.batches_per_update):
                batch = tuple(map(self._pinned, self.dataset[self._next]))
                self._next += 1
                if weights is None:
                    yield batch
                else:
                    x, y, *documents = batch
                    yield WeightedBatch(x, y, documents[0] if documents else None, weights[number])

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._pin_memory else tensor

    def _weights(self) -> Tensor | None:
        """Return the weights of this process's batches in the next update, (batches_per_update,) float32.

        None if all of them are equal.
        """
        if self.batches_per_update * self.dataset.world_size == 1:
            return None
        scored = self.dataset.scored_tokens(np.arange(self._next, self._next + self.batches_per_update))
        if scored is None:
            return None
        return self._pinned(torch.from_numpy(scored[:, self.dataset.rank] / scored.mean()).float())

    def state_dict(self) -> dict[str, int]:
        """Return the number of windows that all processes together have read."""
        return {"windows": self._next * self._windows_per_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the windows that `state_dict` counted. The batch size may differ from before."""
        self._next = state["windows"] // self._windows_per_batch
