"""Send a server many requests of every kind, and see that it stays sound: `python scripts/soak.py`.

Some of the requests are hostile or cut off. The exit status is 1 if one failed by the server's fault, if a
greedy reply differs from the one computed alone, if memory grew, or if a request is open at the end.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from faults.requests import siege

from gpt.files import write_json


def main() -> int:
    """Send them and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--hostile", type=float, default=0.1, help="the fraction of hostile requests")
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = siege(options.requests, random.Random(0), options.hostile, options.precision)
    print(json.dumps(found, indent=2))
    if options.json:
        write_json(options.json, found)
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
