"""Run other people's programs on our module, model, exports and server: `python scripts/guests.py`.

A small GPT is exported and served; each program that is installed then has to give what `gpt` gives. Prints a
table; the exit status is 1 if a check fails. Install the programs, or some of them, first:

    pip install openai langchain-openai litellm llm 'lm_eval[api]' transformers peft torchao ctranslate2 \\
        onnx onnxruntime onnxscript 'llama-cpp-python[server]' gguf
"""

import argparse
import io
import logging
import os
import sys
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from programs import chat, clients, model_formats, torch_tools  # noqa: F401 - each adds its checks
from programs.common import GUESTS, Guest, Place, make_place


def visit(guest: Guest, place: Place) -> dict[str, str]:
    """A row of the table: the program, what was compared, and the result with the reason."""
    try:
        programs = ", ".join(f"{package} {version(package)}" for package in guest.packages)
    except PackageNotFoundError:
        return {"program": guest.packages[0], "what was checked": guest.what, "result": "not installed"}
    output, result = io.StringIO(), "passed"
    try:
        with warnings.catch_warnings(), redirect_stdout(output), redirect_stderr(output):
            warnings.simplefilter("ignore")
            guest.check(place)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        result = f"FAILED: {reason[:150]}"
    return {"program": programs, "what was checked": guest.what, "result": result}


def main() -> int:
    """Run the checks that are asked for and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="WORD", help="only checks with this word in the table")
    options = parser.parse_args()
    word = (options.only or "").lower()
    chosen = [guest for guest in GUESTS if word in f"{guest.packages} {guest.what}".lower()]
    if not chosen:
        parser.error(f"no check has {options.only!r} in its name")
    rows = []
    with tempfile.TemporaryDirectory() as folder, make_place(Path(folder)) as place:
        for guest in chosen:
            torch.manual_seed(0)
            rows.append(visit(guest, place))
            print(*rows[-1].values(), sep=": ", file=sys.stderr, flush=True)
    print("| program | what was checked | result |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row.values())} |")
    return int(any(row["result"].startswith("FAILED") for row in rows))


if __name__ == "__main__":
    # No program may look for something on the network.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    logging.disable(logging.WARNING)
    sys.exit(main())
