"""Compare this program with others in one run on one machine: `python scripts/benchmark.py NAME`.

Each benchmark prints a table. `--json FILE` writes the results; a value of `ratios`
above 1 means that this program is faster or better, unless the notes say otherwise.
`--write docs/benchmarks.md` replaces the table of that page, and `--all` measures all
benchmarks of the page that the given options allow, one after the other.
"""

import argparse
import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

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
    "commands": ("how long README's commands take", "gpt"),
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
    "parts": ("where the time of a step of small models goes", "gpt/training gpt/model.py gpt/attention"),
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
BY_HAND = {"plan"}  # takes hours, and has its figures in docs/log/
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
    "minutes": (str, "of plan: such as 1,4; of commands: of the run"),
    "seeds": (str, "of plan: such as 1,2"),
    "baseline": (Path, "of plan: another checkout of this program"),
    "beside": (bool, "of plan: run it and the other checkout at the same time, on a core each"),
    "table": (Path, "of plan: the CSV of all runs, which is continued"),
}


def main() -> None:
    """Run one benchmark, or all."""
    from gpt.cores import limit_threads

    limit_threads()  # before torch is imported: every program gets the threads that `gpt` takes
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # silences torch's profiler
    parser = _parser()
    options = parser.parse_args()
    given = {name: value for name, value in vars(options).items() if name in OPTIONS}
    from benchmarks.common import commit

    from gpt.files import atomic_write

    if options.write and commit().endswith("-dirty"):
        parser.error("--write names the commit that was measured, but there are changes: commit them first")
    if options.write and options.quick:
        parser.error("--write replaces tables of whole measurements: leave --quick out")
    if options.all and options.json:
        parser.error("--json writes one benchmark: name it")
    if options.all == bool(options.name):
        parser.error("expected the name of a benchmark, or --all")
    if options.all:
        sys.exit(_run_all(options.write, options.quick, given))
    if options.write:
        try:
            replaced(options.write.read_text(encoding="utf-8"), options.name, "")
        except (OSError, ValueError) as error:  # before hours of measuring
            parser.error(f"--write {options.write}: {error}")
    run = import_module(f"benchmarks.{options.name}").run
    for name in given.keys() - inspect.signature(run).parameters.keys():
        parser.error(f"the benchmark {options.name} takes no --{name}")
    report = run(quick=options.quick, **given)
    code = NAMES[options.name][1]
    print(report.markdown(code))
    if options.json:
        report.write(options.json)
    if options.write:
        text = options.write.read_text(encoding="utf-8")
        with atomic_write(options.write) as file:
            file.write(replaced(text, options.name, report.section(code)))


def replaced(page: str, name: str, section: str) -> str:
    """Return a page with the section of a benchmark put between its two marks.

    Raises:
        ValueError: The page lacks these marks.
    """
    begin, end = f"<!-- benchmark {name} -->\n", f"<!-- end of benchmark {name} -->\n"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"the page lacks the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{section}\n\n{end}{after}"


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<10} {purpose}" for name, (purpose, _) in NAMES.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"benchmarks:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=NAMES, nargs="?")
    parser.add_argument("--all", action="store_true", help="all benchmarks of docs/benchmarks.md")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table of this page")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results and their ratios")
    for option, (kind, what) in OPTIONS.items():
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        parser.add_argument(f"--{option}", help=what, default=argparse.SUPPRESS, **how)
    return parser


def _run_all(page: Path | None, quick: bool, given: dict[str, Any]) -> int:
    """Run each benchmark in a process of its own, with those of the options that it takes.

    What has been measured is on the page at once. Returns the number of benchmarks that failed.
    """
    failed = 0
    for name in NAMES:
        parameters = inspect.signature(import_module(f"benchmarks.{name}").run).parameters
        needed = {key for key, value in parameters.items() if value.default is value.empty} - {"quick"}
        if name in BY_HAND or not needed <= given.keys():
            print(f"{name}: left out", file=sys.stderr)
            continue
        command = [sys.executable, __file__, name, *(["--quick"] if quick else [])]
        command += [f"--write={page}"] if page else []
        command += [f"--{key}={value}" for key, value in given.items() if key in parameters]
        failed += subprocess.run(command, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    main()
