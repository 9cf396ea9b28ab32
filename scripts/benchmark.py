"""Compare this program with others in one run on one machine: `python scripts/benchmark.py NAME`.

Each benchmark prints a table and draws a bar chart. `--json FILE` writes the results; a value of `ratios`
above 1 means that this program is faster or better, unless the notes say otherwise.
"""

import argparse
import inspect
import os
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package need not be installed

# Each name is a module benchmarks/NAME.py with `run(quick, ...) -> Report`, imported on demand. Its other
# parameters are the options that the benchmark accepts.
NAMES = {
    "attention": "attention modules, forward and backward",
    "checkpoint": "saving and loading beside bare torch.save and torch.load",
    "data": "tokenizing, reading windows, waiting for batches",
    "generate": "generation beside transformers, and llama.cpp with --llamacpp",
    "learn": "bits per byte reached in nanoGPT's training time (needs --nanogpt and --text)",
    "loop": "the Trainer beside a bare loop of the same step",
    "plan": "runs by --minutes: their time, prediction and result beside a grid chosen by hand",
    "serve": "concurrent requests beside one after another",
    "step": "a GPT-2 small training step beside other implementations",
}


def main() -> None:
    """Run one benchmark."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # silences torch's profiler
    names = "\n".join(f"  {name:<10} {purpose}" for name, purpose in NAMES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few repetitions, as a smoke test"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results and their ratios")
    parser.add_argument(
        "--chart",
        type=Path,
        metavar="FILE",
        help="the bar chart, a PNG; default runs/benchmarks/NAME.png",
    )
    parser.add_argument("--device", help="cpu or cuda")
    parser.add_argument("--batch", type=int, help="windows in a batch")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT")
    parser.add_argument("--nanochat", type=Path, metavar="DIR", help="a checkout of nanochat")
    parser.add_argument("--book", type=Path, metavar="DIR", help="a checkout of LLMs-from-scratch")
    parser.add_argument(
        "--llamacpp", type=Path, metavar="DIR", help="llama.cpp's programs, from scripts/llamacpp.py"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="the tinyshakespeare text; a folder of manual pages"
    )
    parser.add_argument("--script", help="Unicode's name of it: only the lines that are written in it")
    parser.add_argument("--texts", help="of plan: names of corpora; shakespeare is that of --text")
    parser.add_argument("--minutes", help="of plan: such as 1,4")
    parser.add_argument("--part", help="of plan: some of plan,grid,neighbours,stolen")
    options = parser.parse_args()
    run = import_module(f"benchmarks.{options.name}").run
    accepted = inspect.signature(run).parameters
    plan = ("texts", "minutes", "part")
    peers = ("nanogpt", "nanochat", "book", "llamacpp")
    given = {name: getattr(options, name) for name in ("device", "batch", *peers, *plan, "text", "script")}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in accepted:
            parser.error(f"the benchmark {options.name} takes no --{name}")
    import_module("gpt.threads").spread_threads()  # as our commands do; all in this process gain
    report = run(quick=options.quick, **given)
    print(report.markdown())
    chart = options.chart or Path("runs", "benchmarks", f"{options.name}.png")
    report.draw(chart)
    print(f"wrote {chart}")
    if options.json:
        report.write(options.json)


if __name__ == "__main__":
    main()
