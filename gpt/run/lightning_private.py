"""All private parts of Lightning that are used; tried with 2.6.6, and pyproject.toml allows 2.6 alone."""

import logging
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer

_WARNINGS_THAT_DO_NOT_APPLY = (
    ".*treespec, LeafSpec.*",
    ".*does not have many workers.*",  # the loader reads a memory map: workers would only copy
    ".*LightningCLI's args parameter.*",
    ".*smaller than the logging interval.*",  # Lightning's own, unused here
    ".*sync_dist=True.*",  # the sums are reduced before they are logged
    ".*callbacks used to create the checkpoint need to be provided.*",
    r"\s*``instantiate_classes`` was deprecated",  # jsonargparse's, called by Lightning
    r"\s*By default only one JsonargparseDeprecationWarning",
)


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Everything that a checkpoint holds; call it on all processes."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def validation_is_due(trainer: Trainer) -> bool:
    """Whether Lightning validates after the update that has just ended."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def validate_now(trainer: Trainer) -> None:
    """Validate from the first batch on, in the middle of a `fit`: a kill interrupted this validation."""
    validation = trainer.fit_loop.epoch_loop.val_loop
    validation.restarting = False
    trainer.validating = True
    validation.run()
    trainer.training = True


def set_root_folder(trainer: Trainer, folder: Path) -> None:
    """Have Lightning write its own files, such as SLURM's checkpoints, to the run's folder."""
    trainer._default_root_dir = str(folder)  # type: ignore[attr-defined]


def limit_steps(trainer: Trainer, steps: int) -> None:
    """End training after so many updates; also makes Lightning count updates and not epochs on resume."""
    trainer.fit_loop.epoch_loop.max_steps = steps
    trainer.fit_loop.max_epochs = -1
    trainer.fit_loop.min_epochs = 0  # with `min_steps` Lightning asks for a whole epoch too


def skip_sigterm_broadcast(trainer: Trainer) -> None:
    """Leave out the broadcast by which processes agree on SIGTERM before each batch."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def requeue_signal(trainer: Trainer) -> int:
    """The signal with which SLURM announces the end of a job that Lightning will queue again, else 0."""
    environment = trainer._accelerator_connector.cluster_environment
    if sys.platform == "win32" or not isinstance(environment, SLURMEnvironment):
        return 0
    return (environment.requeue_signal or signal.SIGUSR1) if environment.auto_requeue else 0


def silence_warnings() -> None:
    """Silence Lightning's advertisements and the warnings that do not apply here."""
    for library in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.WARNING)
    for message in _WARNINGS_THAT_DO_NOT_APPLY:
        warnings.filterwarnings("ignore", message)
