"""`gpt compare`: compare variants on the same texts, batches and seeds."""

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from gpt.compare.picture import draw
from gpt.compare.result import Design, as_json, described, lines
from gpt.compare.runner import Processes, Runner, candidates_of, train_all
from gpt.compare.trainings import Candidate, Text
from gpt.compare.variants import Variant, parse_variants, slug
from gpt.errors import InputError, check_least
from gpt.files import locked, write_json
from gpt.help import PlainHelpFormatter
from gpt.pictures.figures import save
from gpt.plain import parse_json, plain_name, shown
from gpt.progress import notice, report

FOLDER = Path("comparisons")
_SEEDS = 3
_FIRST_SEED = 1337
_HELP = """Train variants with several seeds, and say whether they differ by more than chance.

The words before the options name the base: a recipe, a config file, or a folder that holds an
edited copy of this program. Options of gpt fit are the change. Where there are more variants, `vs`
stands between them, and options before the first `vs` hold for all.

Every run is a process of its own. The same command, given again, continues where it was
interrupted. With more --seeds it makes only the missing runs."""
_EXAMPLES = """examples:
  gpt compare quick --model.optimizer.lr 3e-3
  gpt compare quick tinyshakespeare --texts my.txt --steps 500
  gpt compare quick vs --model.optimizer.lr 3e-3 vs --model.optimizer.lr 8e-3 --seeds 5
  gpt compare quick ../my-copy"""


def main(arguments: list[str]) -> None:
    """Run `compare ...`; InputError for input that cannot be used."""
    own, words = _parser().parse_known_args(arguments[1:])
    with ending_at_signals():
        compare(words, own.texts, own.seeds, own.first_seed, own.steps, own.name, Processes())


def compare(
    words: list[str],
    texts: str | None,
    seeds: int,
    first_seed: int,
    steps: int | None,
    name: str | None,
    runner: Runner,
) -> Path:
    """Train the missing runs, print the result, and return the comparison's folder."""
    check_least(2, seeds=seeds)
    check_least(0, first_seed=first_seed)
    variants = parse_variants(words)
    folder = folder_of(name or default_name(variants, first_seed))
    candidates = candidates_of(variants, runner)
    design = Design(
        candidates=tuple(candidates),
        texts=texts_of(texts) if texts else (Text.of(candidates[0].options["data"]["corpus"]),),
        seeds=tuple(range(first_seed, first_seed + seeds)),
        steps=steps_of(steps, candidates[0]),
    )
    with opened(folder):
        if name is None:
            check_folder(folder, design)
        trainings = design.trainings()
        report(f"{len(trainings)} runs in {folder}/", prefix="gpt compare: ")
        outcomes = train_all(trainings, folder, runner)
        diverged = [
            training
            for training in trainings
            if training.candidate is design.base and not outcomes[training].is_finite
        ]
        if diverged:
            raise InputError(f"the base diverged: {diverged[0].name} has no finite loss")
        write_json(folder / "result.json", as_json(design, outcomes))
        save(draw(design, outcomes), folder / "comparison.png")
    print("\n".join(lines(design, outcomes)))
    print(f"\n{folder}/ holds comparison.png, result.json and the runs")
    return folder


def texts_of(names: str) -> tuple[Text, ...]:
    """Return the texts of a comma-separated list; InputError for one that is named twice."""
    texts = [Text.of(name) for name in names.split(",")]
    labels = [text.name for text in texts]
    if len(set(labels)) < len(labels) or "" in labels:
        raise InputError(f"--texts {shown(names)}: expected names that differ, with commas between them")
    return tuple(texts)


def steps_of(steps: int | None, base: Candidate) -> int:
    """Return the number of steps: as given, else the base's; InputError if it has none."""
    if steps is None:
        steps = int(base.options["trainer"]["max_steps"])
        if steps < 1:
            raise InputError(f"{base.variant.name} has no trainer.max_steps: give --steps")
    check_least(2, steps=steps)
    return steps


def default_name(variants: Sequence[Variant], first_seed: int) -> str:
    """Return the name of a folder for these variants. A repetition with other seeds has its own."""
    names = slug(" vs ".join(variant.name for variant in variants))
    return names if first_seed == _FIRST_SEED else f"{names}-from-{first_seed}"


def folder_of(name: str) -> Path:
    """Return `comparisons/NAME`; InputError for a name that cannot be a folder's."""
    return FOLDER / plain_name("name", name)


def check_folder(folder: Path, design: Design) -> None:
    """Raise InputError if the folder has the result of another comparison, which would be replaced.

    Variants are others if they have other names, words or sources. A file that was edited is the same one.
    A comparison may be given more seeds. One with a --name may be given anything else: it keeps the runs that
    it has.
    """
    path = folder / "result.json"
    if not path.is_file():
        return
    try:
        earlier = parse_json(path.read_text(encoding="utf-8"))
        present = [described(candidate.variant) for candidate in design.candidates]
        before = [{name: variant[name] for name in present[0]} for variant in earlier["variants"]]
        differs = {
            "variants": before != present,
            "texts": earlier["texts"] != [text.corpus for text in design.texts],
            "steps": earlier["steps"] != design.steps,
            "seeds": not set(earlier["seeds"]) <= set(design.seeds),
        }
    except (ValueError, LookupError, TypeError):  # it is damaged, and written again
        return
    if others := " and ".join(what for what, is_other in differs.items() if is_other):
        raise InputError(f"{path} is of a comparison with other {others}: give this one another --name")


@contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Lock the folder for this process; InputError if another process uses it."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            has_locks = stack.enter_context(locked(folder / ".lock"))
        except BlockingIOError:
            raise InputError(
                f"{folder} is in use by another process: wait for its end, or give a --name"
            ) from None
        if not has_locks:
            notice(f"the file system of {folder} has no locks: let no second process use it meanwhile")
        yield


@contextmanager
def ending_at_signals() -> Iterator[None]:
    """Treat signals that end this process like Ctrl-C: the present run is stopped and saves itself."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))]
    ours = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpt compare",
        usage="gpt compare [BASE] [--NAME VALUE]... [vs [CONFIG|FOLDER] [--NAME VALUE]...]...",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=PlainHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--seeds", type=int, metavar="N", default=_SEEDS, help="runs of each variant")
    parser.add_argument("--first_seed", type=int, metavar="N", default=_FIRST_SEED, help="the first seed")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="steps of each run, by default those of the base's config"
    )
    parser.add_argument(
        "--texts", metavar="A,B", help="one text or several, by default that of the base's config"
    )
    parser.add_argument(
        "--name", help="the folder under comparisons/ to write to, by default the variants' names"
    )
    return parser
