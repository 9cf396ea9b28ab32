"""The `gpt` command: a thin dispatcher that imports a command's code only when it is called."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt.errors import InputError

COMMANDS = {
    "fit": "train a model: gpt fit --config configs/quick.yaml --data.corpus my.txt",
    "validate": "score a checkpoint with the loop that fit uses",
    "prepare": "turn a text, a folder or a data set into token files: gpt prepare my.txt --output my-tokens",
    "generate": "write text: gpt generate --prompt 'Return the '",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 2 for what a person can mend, with one line on stderr.

    Args:
        arguments: what follows the program's name; None takes them from the command line.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    command, rest = arguments[0], arguments[1:]
    try:
        if command not in COMMANDS:
            raise InputError(f"unknown command {command!r}, expected one of {', '.join(COMMANDS)}")
        run(command, rest)
    except (InputError, OSError) as error:
        if os.environ.get("GPT_TRACEBACK"):
            raise
        print(f"gpt {command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    return 0


def usage() -> str:
    """The top-level help."""
    lines = [f"  {name:<10} {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        [
            "usage: gpt COMMAND [OPTIONS]",
            "",
            "Train a small GPT, generate text with it. 'gpt COMMAND --help' lists a command's options.",
            "",
            *lines,
            "",
            "example: gpt fit && gpt generate --prompt 'Return a new '",
        ]
    )
