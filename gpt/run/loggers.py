"""The loggers of a run beside metrics.csv: TensorBoard and Weights & Biases."""

import json
import uuid
from typing import Literal

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger

from gpt.errors import InputError
from gpt.files import Folder
from gpt.run.folder import RunFolder
from gpt.weights.checkpoint import RunPart

Ending = Literal["success", "aborted", "failed"]
"""The end of a run: by its limits, by a signal, by an error."""
_WANDB_ID = "run-id"  # a file in the run's folder `wandb`


def open_loggers(names: str, folder: RunFolder, run: RunPart) -> list[Logger]:
    """Open the loggers of a run beside metrics.csv, and tell them the run's options.

    `names` is the option `trainer.logger`. A resumed run goes on in the logs of its folder. Raises InputError
    if a logger cannot start.
    """
    loggers = []
    for name in names.split(","):
        try:
            if name != "csv":
                loggers.append(_logger(name, folder, run))
        except (InputError, OSError):
            raise
        except ImportError:
            raise InputError(f"the logger {name} needs a package: pip install {name}") from None
        except Exception as error:  # any of its package, such as a missing key
            raise InputError(f"the logger {name} cannot start: {' '.join(str(error).split())}") from None
    return loggers


def close_logger(logger: Logger, ending: Ending) -> None:
    """Tell a logger how the run has ended."""
    logger.finalize(ending)
    if isinstance(logger, WandbLogger):  # whose `finalize` leaves the run open until the process ends
        logger.experiment.finish(exit_code=0 if ending == "success" else 1)


def _logger(name: str, folder: RunFolder, run: RunPart) -> Logger:
    """Open a logger, and tell it the run's options."""
    path = folder.path
    options = json.loads(json.dumps(run.options))  # lists for tuples, which YAML has not
    with folder.top.below(name) as files:  # raises InputError if it is a link
        if name == "wandb":
            wandb = WandbLogger(name=path.name, save_dir=path, id=_wandb_id(files))
            wandb.log_hyperparams(options)
            return wandb
        board = TensorBoardLogger(path, "tensorboard", "", purge_step=run.step + 1)  # keeps this step
        # Its table needs a metric, by default a constant -1.
        board.log_hyperparams(options, {"step": run.step}, step=run.step)
        return board


def _wandb_id(files: Folder) -> str:
    """Return the run's name at Weights & Biases; its first start chooses it and keeps it in a file."""
    if not files.is_file(_WANDB_ID):
        with files.write(_WANDB_ID) as file:
            file.write(uuid.uuid4().hex)
    return files.read(_WANDB_ID).decode()
