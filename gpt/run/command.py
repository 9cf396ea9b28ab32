"""`gpt fit` and `gpt validate`: read the command line, then import Lightning and run what it asks for.

`--help` and input that cannot be used do not wait for Lightning, whose import takes seconds.
"""

from dataclasses import asdict

import torch
import yaml

from gpt.errors import InputError
from gpt.imports import importing
from gpt.run.folder import Claim
from gpt.run.start import start


def main(arguments: list[str], began: float | None = None, alone: bool = False) -> None:
    """Run `fit ...` or `validate ...`; InputError for input that cannot be used.

    The minutes of a run count from `began`, when the process started by `time.perf_counter`; by default now.
    `alone` says that the process does nothing else.
    """
    with Claim() as claim:
        _main(*arguments, claim=claim, began=began, alone=alone)


def _main(command: str, *rest: str, claim: Claim, began: float | None, alone: bool) -> None:
    origin = start(command, list(rest), claim, began)
    if "--print_config" in rest:
        print(yaml.safe_dump(asdict(origin.options), sort_keys=False, allow_unicode=True), end="")
        return
    with importing(alone):
        from gpt.run.fit import fit, prepare_process, validate
    prepare_process()
    run = validate if command == "validate" else fit
    try:
        run(origin)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        what = "give a smaller --data.batch_size; with --data.tokens_per_update the updates stay the same"
        raise InputError(f"the model or a batch does not fit into memory: {what}") from error


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory did not suffice.

    On a GPU this has a type of its own. On a CPU, PyTorch raises a plain RuntimeError: then only its text
    tells, which names the allocator.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "alloc" in str(error).lower() or "out of memory" in str(error).lower()
