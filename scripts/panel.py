"""Test up to seven changes of a recipe at once: `python scripts/panel.py BASE vs LEVER vs LEVER ...`.

Each lever, some options of `gpt fit`, is on in half of at most eight variants, a fractional factorial design.
Its effect on a text is the mean of the candidates with it less the mean of those without. Every candidate is
trained on every text with the same seeds; --kept texts are trained on once, in the end, by the base and by
all levers together that gained. Finished runs are kept: the same command resumes.

What is printed: for each lever the change of the bits per byte after the same steps, of the time of a step,
and of the bits per byte in the same time, with 95 % intervals over the texts.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package need not be installed

from gpt.command_line import values_in
from gpt.compare.command import ending_at_signals, folder_of, opened
from gpt.compare.interval import Interval, paired_interval
from gpt.compare.result import Design, Outcomes, difference, percent
from gpt.compare.runner import Processes, Runner, candidates_of, train_all
from gpt.compare.trainings import Candidate, Text
from gpt.compare.variants import OUR_SOURCE, Part, Variant, split
from gpt.data.find import find_corpus
from gpt.errors import InputError, check_least
from gpt.files import write_json
from gpt.progress import aligned

TEXTS = "python-docs,python-stdlib"  # what each Python has
BASE = (
    *("--config", "quick", "--model.config.context_length", "64", "--data.batch_size", "24"),
    *("--data.vocabulary", "learn"),
)
MOST_LEVERS = 7
MOST_BYTES = 3_000_000  # of a text
BYTES_PER_ID = 225  # of the text for each token of its vocabulary
MOST_IDS = 8192
LEAST_GAIN = 0.004  # in the same time, for a lever to be kept
SHARE_OF_TEXTS = 5 / 6  # that have to gain by it
# How a candidate's runs differ from the base's: fields of `Change`, and what they are called.
KINDS = {"bits": "in the same steps", "time": "time of a step", "equal_time": "in the same time"}
# What each text decides, so no lever may.
OF_TEXTS = ("model.config.vocab_size", "data.vocabulary", "data.most_bytes")


@dataclass(frozen=True)
class Lever:
    """A change that is tested."""

    name: str
    options: tuple[str, ...]


Values = dict[str, tuple[float, ...]]
"""For each of `KINDS`, a logarithm for each text: -0.02 is 2 % less."""


@dataclass(frozen=True)
class Effect:
    """What a lever changes."""

    lever: Lever
    values: Values

    @property
    def texts_that_gain(self) -> int:
        """In the same time."""
        return sum(value < 0 for value in self.values["equal_time"])

    @property
    def is_kept(self) -> bool:
        """Whether it gains enough in the mean, and on enough of the texts."""
        gains = self.values["equal_time"]
        enough = math.ceil(SHARE_OF_TEXTS * len(gains))
        return fmean(gains) <= -LEAST_GAIN and self.texts_that_gain >= enough


def factorial(levers: int) -> list[tuple[bool, ...]]:
    """Return which levers are on in each candidate: none in the first, each in half, each pair in a quarter.

    Up to three levers all combinations; the further ones are products of the first three, whose signs are
    such that the base is one of the eight candidates.
    """
    rows = []
    for a, b, c in product((-1, 1), repeat=3):
        columns = (a, b, c, a * b * c, -a * b, -a * c, -b * c)[:levers]
        row = tuple(sign > 0 for sign in columns)
        if row not in rows:
            rows.append(row)
    return rows


def parse_levers(words: Sequence[str]) -> tuple[Variant, list[Lever]]:
    """The base and the levers of a command line; InputError for too many, or for what is no option."""
    first, *others = map(Part.of, split(words))
    words_of_base = (*(first.config or BASE), *first.options)
    base = Variant(first.name or "panel", words_of_base, first.source or OUR_SOURCE)
    if len(others) > MOST_LEVERS:
        raise InputError(f"expected at most {MOST_LEVERS} levers, got {len(others)}")
    for part in others:
        if part.word is not None:
            raise InputError(f"{part.word}: a lever is options, as levers are combined")
        for name, _ in values_in(part.options):
            if name in OF_TEXTS:
                raise InputError(f"--{name}: each text has its own, by its size")
    levers = [Lever(part.name, part.options) for part in others]
    if len({lever.name for lever in levers}) < len(levers):
        raise InputError("two levers are the same")
    return base, levers


def variants_of(base: Variant, levers: Sequence[Lever]) -> list[Variant]:
    """Those of the design, the base first."""
    return [
        together(base, [lever for lever, is_on in zip(levers, row, strict=True) if is_on])
        for row in factorial(len(levers))
    ]


def together(base: Variant, levers: Sequence[Lever]) -> Variant:
    """The base with all of these levers."""
    options = (word for lever in levers for word in lever.options)
    name = "+".join(lever.name for lever in levers) or base.name
    return Variant(name, (*base.words, *options), base.source)


def panel_text(name: str) -> Text:
    """A text with its vocabulary: the largest power of two of ids that its length allows, up to 8,192."""
    corpus = find_corpus(name)
    length = corpus.size() or sum(len(piece.text.encode()) for piece in corpus.pieces(MOST_BYTES))
    ids = min(MOST_IDS, max(512, 2 ** int(math.log2(max(1, min(length, MOST_BYTES) / BYTES_PER_ID)))))
    options: tuple[str, ...] = ("--model.config.vocab_size", str(ids))
    if length > MOST_BYTES:
        options += ("--data.most_bytes", str(MOST_BYTES))
    return Text.of(name, options)


def effects(design: Design, outcomes: Outcomes, levers: Sequence[Lever]) -> list[Effect]:
    """Return the effect of each lever, from the candidates of the design."""
    changes = [values_of(design, outcomes, candidate) for candidate in design.candidates]
    rows = factorial(len(levers))
    found = []
    for number, lever in enumerate(levers):
        with_it = [values for values, row in zip(changes, rows, strict=True) if row[number]]
        without = [values for values, row in zip(changes, rows, strict=True) if not row[number]]
        values = {kind: _contrast(with_it, without, kind) for kind in KINDS}
        found.append(Effect(lever, values))
    return found


def values_of(design: Design, outcomes: Outcomes, candidate: Candidate) -> Values:
    """What a candidate changes on each text, in the mean over seeds; an InputError where it diverged."""
    found = difference(design, outcomes, candidate)
    if found is None:
        raise InputError(f"{candidate.variant.name} diverged: leave one of its levers out")
    return {kind: tuple(map(fmean, getattr(found, kind))) for kind in KINDS}


def _contrast(with_it: Sequence[Values], without: Sequence[Values], kind: str) -> tuple[float, ...]:
    """The mean of the candidates with a lever less that of those without, for each text."""
    texts = range(len(without[0][kind]))
    return tuple(
        fmean(values[kind][text] for values in with_it) - fmean(values[kind][text] for values in without)
        for text in texts
    )


def lines(found: Sequence[Effect]) -> list[str]:
    """The effects, and the sum of those that are kept."""
    rows = [("lever", *KINDS.values(), "texts that gain", "")]
    for effect in found:
        gain = f"{effect.texts_that_gain} of {len(effect.values['bits'])}"
        cells = [told(effect.values[kind]) for kind in KINDS]
        rows.append((effect.lever.name, *cells, gain, "kept" if effect.is_kept else ""))
    kept = [effect.values for effect in found if effect.is_kept]
    if len(kept) > 1:
        sums = [tuple(map(sum, zip(*(values[kind] for values in kept), strict=True))) for kind in KINDS]
        rows.append(("the kept ones, added", *map(told, sums), "", ""))
    return aligned(rows)


def told(values: Sequence[float]) -> str:
    """The mean over texts, with its interval where there are two or more."""
    interval: Interval | float = paired_interval([values]) if len(values) > 1 else values[0]
    return percent(interval)


def panel(
    words: Sequence[str],
    texts: Sequence[str],
    kept_texts: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    name: str,
    runner: Runner,
) -> list[Effect]:
    """Train what is missing, print and return the effects."""
    check_least(2, steps=steps)
    check_least(1, seeds=len(seeds))
    if set(texts) & set(kept_texts):
        raise InputError("a kept text is one that no lever is chosen by: name others with --kept")
    base, levers = parse_levers(words)
    folder = folder_of(name)
    of_texts = tuple(map(panel_text, texts))
    of_kept = tuple(map(panel_text, kept_texts))
    with opened(folder):
        of_levers = candidates_of(variants_of(base, levers), runner)
        design = Design(tuple(of_levers), of_texts, tuple(seeds), steps)
        found = effects(design, train_all(design.trainings(), folder, runner), levers)
        print("\n".join(lines(found)), flush=True)
        result = {"steps": steps, "texts": texts, "levers": {one.lever.name: one.values for one in found}}
        winners = [effect.lever for effect in found if effect.is_kept]
        if winners and of_kept:
            pair = candidates_of([base, together(base, winners)], runner)
            last = Design(tuple(pair), of_kept, tuple(seeds), steps)
            values = values_of(last, train_all(last.trainings(), folder, runner), pair[1])
            result |= {"kept_texts": kept_texts, "together": values}
            print(f"\n{pair[1].variant.name} on {', '.join(text.name for text in of_kept)}, not seen before:")
            print("\n".join(f"  {label}: {told(values[kind])}" for kind, label in KINDS.items()))
        write_json(folder / "panel.json", result)
    print("\nBelow 0 is better. Brackets: 95 % intervals over the texts. It assumes that effects add up.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, by default this process's; bad input is one line and the status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="panel.py [BASE] [--NAME VALUE]... vs --NAME VALUE [vs --NAME VALUE]...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--texts", default=TEXTS, metavar="A,B", help=f"files and corpora, default {TEXTS}")
    parser.add_argument("--kept", default="", metavar="C,D", help="texts that only the end uses")
    parser.add_argument("--steps", type=int, default=1500, help="of each run, 1500 by default")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each candidate on each text")
    parser.add_argument("--first_seed", type=int, default=1337, help="the others follow it")
    parser.add_argument("--name", default="panel", help="of the folder under comparisons/")
    own, words = parser.parse_known_args(arguments)
    seeds = range(own.first_seed, own.first_seed + own.seeds)
    kept = [name for name in own.kept.split(",") if name]
    try:
        with ending_at_signals():
            panel(words, own.texts.split(","), kept, seeds, own.steps, own.name, Processes())
    except (InputError, OSError) as error:
        print(f"panel.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("panel.py: interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
