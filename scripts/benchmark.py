"""Measure the program beside others, in one run on one machine: `python scripts/benchmark.py NAME`.

Every benchmark prints a table, draws a bar chart, and writes with `--json FILE` an object whose `ratios`
names each target: above 1, this program is the faster, or the better.
"""

import argparse
import os
from importlib import import_module
from pathlib import Path

# A name is a module scripts/benchmarks/NAME.py with `run(quick: bool) -> Report`, imported when asked for.
NAMES = {
    "attention": "attention modules, forward and backward",
}


def main() -> None:
    """Run one benchmark."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler, which counts memory, is chatty
    names = "\n".join(f"  {name:<10} {purpose}" for name, purpose in NAMES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few repetitions, to see that it runs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results and their ratios")
    parser.add_argument(
        "--chart",
        type=Path,
        metavar="FILE",
        help="the bar chart, a PNG; runs/benchmarks/NAME.png if left out",
    )
    options = parser.parse_args()
    report = import_module(f"benchmarks.{options.name}").run(quick=options.quick)
    print(report.markdown())
    chart = options.chart or Path("runs", "benchmarks", f"{options.name}.png")
    report.draw(chart)
    print(f"The bar chart is {chart}.")
    if options.json:
        report.write(options.json)


if __name__ == "__main__":
    main()
