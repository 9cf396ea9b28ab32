"""`gpt` as one of several processes: `python scripts/faults/replica.py BACKEND REPORT fit ...`.

They talk by BACKEND, gloo where NCCL refuses as they share a GPU, and REPORT says how they trained: whether
by DistributedDataParallel, with what backend, and how many of them. The environment is as torchrun sets it.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch.strategies import DDPStrategy

from gpt.cli import main
from gpt.run import distributed


class Reporting(DDPStrategy):
    """Says how a run trains, once it does."""

    def __init__(self, report: Path, **options: Any) -> None:
        super().__init__(**options)
        self.report = report

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        told = {
            "model": type(self.model).__name__,
            "backend": torch.distributed.get_backend(),
            "processes": torch.distributed.get_world_size(),
        }
        self.report.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    backend, report, *arguments = sys.argv[1:]
    reporting = partial(Reporting, Path(report), process_group_backend=backend)
    with patch.object(distributed, "DDPStrategy", reporting):
        status = main(arguments)
    if torch.distributed.is_initialized():  # its threads must not outlive the interpreter: that can abort
        torch.distributed.destroy_process_group()
    sys.exit(status)
