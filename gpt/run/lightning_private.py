"""All that a run uses of Lightning beside its public interface. Tested with 2.6.6; only 2.6 is allowed."""

import logging
import sys
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


def ask_for_validation(trainer: Trainer, wanted: bool) -> None:
    """Ask Lightning to validate after the hooks of the present batch, or not to.

    It does so where `val_check_batch` divides the batches of this process so far. Its public setting,
    `val_check_interval`, is fixed before training. The validations of a run are counted in updates over all
    resumes, come less often in a run that has become longer, and come last after an update that only the
    clock decides.
    """
    trainer.val_check_batch = 1 if wanted else sys.maxsize


def silence_warnings() -> None:
    """Silence Lightning's advertisements and the warnings that do not apply here."""
    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)
    for message in _WARNINGS_THAT_DO_NOT_APPLY:
        warnings.filterwarnings("ignore", message)
