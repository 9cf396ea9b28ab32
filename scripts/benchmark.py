"""Compare this program with others in one run on one machine: `python scripts/benchmark.py NAME`.

Each benchmark prints a table. `--json FILE` writes the results; a value of `ratios`
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
# parameters are the options that the benchmark accepts. Beside its purpose stands the code that it measures:
# a table of docs/ is stale when that has changed (tests/test_measured.py).
NAMES = {
    "attention": ("attention modules, forward and backward", "gpt/attention"),
    "checkpoint": (
        "saving and loading beside bare torch.save and torch.load",
        "gpt/weights gpt/run/checkpoint.py gpt/files.py",
    ),
    "data": ("tokenizing, reading windows, waiting for batches", "gpt/data gpt/text"),
    "generate": (
        "generation beside transformers, and llama.cpp with --llamacpp",
        "gpt/generation gpt/model.py",
    ),
    "learn": (
        "bits per byte reached in nanoGPT's training time (needs --nanogpt and --text)",
        "gpt/training gpt/run gpt/data gpt/model.py gpt/attention configs/tinyshakespeare.yaml",
    ),
    "loop": ("the Trainer beside a bare loop of the same step", "gpt/run gpt/training"),
    "plan": (
        "runs by --minutes: their time and result, beside those of another checkout",
        "gpt/plan gpt/training gpt/run gpt/data",
    ),
    "serve": ("concurrent requests beside one after another", "gpt/serve gpt/generation"),
    "step": (
        "a GPT-2 small training step beside other implementations",
        "gpt/training gpt/model.py gpt/attention",
    ),
}
OPTIONS: dict[str, tuple[type, str]] = {
    "device": (str, "cpu or cuda"),
    "batch": (int, "windows in a batch"),
    "nanogpt": (Path, "a checkout of nanoGPT"),
    "nanochat": (Path, "a checkout of nanochat"),
    "book": (Path, "a checkout of LLMs-from-scratch"),
    "llamacpp": (Path, "llama.cpp's programs, built as docs/benchmarks.md says"),
    "text": (Path, "the tinyshakespeare text"),
    "chart": (Path, "of learn: where to draw the race"),
    "texts": (str, "of plan: corpora, such as python-docs,input.txt"),
    "minutes": (str, "of plan: such as 1,4"),
    "seeds": (str, "of plan: such as 1,2"),
    "baseline": (Path, "of plan: another checkout of this program"),
    "table": (Path, "of plan: the CSV of all runs, which is continued"),
}


def main() -> None:
    """Run one benchmark."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # silences torch's profiler
    names = "\n".join(f"  {name:<10} {purpose}" for name, (purpose, _) in NAMES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results and their ratios")
    for option, (kind, what) in OPTIONS.items():
        parser.add_argument(f"--{option}", type=kind, help=what, default=argparse.SUPPRESS)
    options = parser.parse_args()
    run = import_module(f"benchmarks.{options.name}").run
    given = {name: value for name, value in vars(options).items() if name in OPTIONS}
    for name in given.keys() - inspect.signature(run).parameters.keys():
        parser.error(f"the benchmark {options.name} takes no --{name}")
    report = run(quick=options.quick, **given)
    print(report.markdown(code=NAMES[options.name][1]))
    if options.json:
        report.write(options.json)


if __name__ == "__main__":
    main()
