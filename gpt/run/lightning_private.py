"""The private part of Lightning that is used. Tested with 2.6.6; pyproject.toml allows only 2.6."""

import logging
import warnings

from lightning.pytorch import Trainer

_WARNINGS_THAT_DO_NOT_APPLY = (
    ".*treespec, LeafSpec.*",
    ".*does not have many workers.*",  # the loader reads a memory map; workers would only copy
    ".*sync_dist=True.*",  # the sums are reduced before they are logged
)


def skip_sigterm_broadcast(trainer: Trainer) -> None:
    """Leave out the broadcast by which processes agree on SIGTERM before each batch.

    It would wait for the device in each batch, and no public setting turns it off. `Guard` agrees on signals
    once per update instead.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def silence_warnings() -> None:
    """Silence Lightning's advertisements and the warnings that do not apply here."""
    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)
    for message in _WARNINGS_THAT_DO_NOT_APPLY:
        warnings.filterwarnings("ignore", message)
