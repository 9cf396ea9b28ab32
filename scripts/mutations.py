"""Changes the package in one place at a time and runs the tests of that room: what none notices is printed.

    python scripts/mutations.py --count 300 --seed 1

A change that a test notices takes seconds, another minutes. Works in a copy; needs POSIX.
"""

import argparse
import ast
import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COPIED = "gpt tests scripts configs data docs pyproject.toml README.md CONTRIBUTING.md"
# Files of the package, and the tests of each, the quickest first.
ROOMS = {
    "attention/*.py": "attention test_model.py pictures/test_attention_maps.py",
    "model.py": "test_model.py weights training/test_precision.py generation/test_engine.py",
    "training/loss.py": "training/test_loss.py training/test_precision.py",
    "training/module.py": "training run/test_python_docs.py run/test_golden.py run/test_ends.py "
    "run/test_distributed.py",
    "training/optimizers/*.py": "training run/test_golden.py run/test_resume.py run/test_distributed.py",
    "data/windows.py": "data/test_windows.py data/test_module.py data/test_examples.py run/test_golden.py",
    "generation/sampling.py": "generation/test_sampling.py generation/test_engine.py serve",
    "generation/text.py": "generation/test_text.py generation/test_api.py serve",
    "run/time_limit.py": "run/test_time_limit.py run/test_limits.py plan",
    "run/limits.py": "run/test_limits.py run/test_ends.py run/test_resume.py plan run/test_save.py "
    "run/test_fit.py",
    "run/checkpoint.py": "run/test_save.py run/test_best.py run/test_hostile_folder.py run/test_resume.py "
    "run/test_snapshots.py",
}
OPPOSITES = [
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or), (ast.Lt, ast.LtE)),
    *((ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
]
OPPOSITE = {two: one for one, two in OPPOSITES} | dict(OPPOSITES)


def nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What computes: not annotations and decorators, nor what is raised."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            left_out = name in ("annotation", "returns", "decorator_list") or isinstance(child, ast.Raise)
            if isinstance(child, ast.AST) and not left_out:
                yield from nodes(child)


def changes(node: ast.AST) -> Iterator[dict[str, Any]]:
    """Each way to change a node, as the attributes to set."""
    match node:
        case ast.BinOp() | ast.BoolOp() if type(node.op) in OPPOSITE:
            yield {"op": OPPOSITE[type(node.op)]()}
        case ast.Compare():
            yield {"ops": [OPPOSITE[type(node.ops[0])](), *node.ops[1:]]}
        case ast.If() | ast.IfExp() | ast.While():
            yield {"test": ast.UnaryOp(ast.Not(), node.test)}
            yield {"test": ast.Constant(False)}
        case ast.Constant(value=bool()):
            yield {"value": not node.value}
        case ast.Constant(value=int() | float() as number):
            yield {"value": number + 1}
        case ast.Call() if node.keywords:
            yield {"keywords": node.keywords[:-1]}
        case ast.Expr(value=ast.Call()):
            yield {"value": ast.Constant(None)}


def changed(source: str, place: int, way: int) -> tuple[str, str]:
    """The changed source, and what stands there now."""
    tree = ast.parse(source)
    node = list(nodes(tree))[place]
    line = f"{getattr(node, 'lineno', 0)}: {ast.unparse(node).splitlines()[0]}"
    for name, value in list(changes(node))[way].items():
        setattr(node, name, value)
    ast.fix_missing_locations(tree)
    return ast.unparse(tree), f"{line}  ->  {ast.unparse(node).splitlines()[0]}"


def is_noticed(folder: Path, tests: str) -> bool:
    """Whether a test fails, in a fork, which need not import torch again."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] != 0
    status = 1
    try:
        os.chdir(folder)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        resource.setrlimit(resource.RLIMIT_CPU, (900, 900))  # seconds: no signal ends a loop of NumPy's
        import pytest

        options = ["-x", "-m", "not slow", "-p", "no:cacheprovider", "--timeout", "150", "--assert", "plain"]
        status = int(pytest.main([*options, *(f"tests/{name}" for name in tests.split())]))
    finally:
        os._exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="how many changes to draw")
    parser.add_argument("--seed", type=int, default=1, help="which")
    options = parser.parse_args()
    tests = {path: tests for name, tests in ROOMS.items() for path in sorted((ROOT / "gpt").glob(name))}
    sources = {path: path.read_text("utf-8") for path in tests}
    found = [
        (path, place, way)
        for path, source in sources.items()
        for place, node in enumerate(nodes(ast.parse(source)))
        for way, _ in enumerate(changes(node))
    ]
    drawn = random.Random(options.seed).sample(found, options.count)
    noticed = 0
    with tempfile.TemporaryDirectory() as name:
        for copied in COPIED.split():
            copy = shutil.copytree if (ROOT / copied).is_dir() else shutil.copy
            copy(ROOT / copied, Path(name, copied))
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": name}
        sys.path.insert(0, name)
        import lightning.pytorch  # noqa: F401 - for the forks

        for room in dict.fromkeys(tests[path] for path, _, _ in drawn):
            if is_noticed(Path(name), room):
                sys.exit(f"the tests {room} fail without a change")
        for path, place, way in drawn:
            source, what = changed(sources[path], place, way)
            file = Path(name, path.relative_to(ROOT))
            file.write_text(source, "utf-8")
            if is_noticed(Path(name), tests[path]):
                noticed += 1
            else:
                print(f"survived: {path.relative_to(ROOT)}:{what}", flush=True)
            file.write_text(sources[path], "utf-8")
    print(f"{noticed} of {len(drawn)} changes noticed, {noticed / len(drawn):.0%}")


if __name__ == "__main__":
    main()
