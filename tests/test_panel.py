"""scripts/panel.py: its design, and the effects that it finds on runs whose results are made up."""

import math
from pathlib import Path

import numpy as np
import panel
import pytest

from gpt.errors import InputError
from gpt.files import write_json
from gpt.plain import parse_json

LEVERS = [f"--model.x{number}" for number in range(7)]
WORDS = [word for lever in LEVERS for word in ("vs", lever, "1")]


class Pretended:
    """A machine whose runs end at once: levers add what `gains` says, a text its own part of that."""

    def __init__(self, gains, slower):
        self.gains = gains
        self.slower = slower
        self.trained = []

    def options(self, variant):
        data = {"corpus": "python-docs", "vocabulary": "learn"}
        return {"model": {"init_from": None}, "data": data, "words": list(variant.words)}

    def train(self, training, folder, watch):
        words = training.recipe.variant.words
        on = [number for number, lever in enumerate(LEVERS) if lever in words]
        part = 1 + 0.1 * math.sin(len(training.text.name))
        logarithm = part * sum(self.gains[number] for number in on)
        logarithm += math.log(0.96) * math.log2(training.steps / 100)
        bits = 2 * math.exp(logarithm)
        milliseconds = 20 * math.prod(self.slower.get(number, 1.0) for number in on)
        self.trained.append((training.text.name, training.steps, tuple(on)))
        run = folder / "runs" / training.name
        run.mkdir(parents=True)
        table = "step,tokens,tokens_per_second,val_bits_per_byte\n"
        table += f"{training.steps},{training.steps},{1000 / milliseconds},{bits}\n"
        (run / "metrics.csv").write_text(table, encoding="utf-8")
        write_json(run / "summary.json", {"val_loss": bits, "val_bits_per_byte": bits, "best_loss": bits})
        watch()


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"{'a' * length}.txt" for length in range(1, 9)]
    for name in names:
        Path(name).write_text("A text of some length. " * 9000, encoding="utf-8")
    return names


def measure(machine, texts, kept=(), words=WORDS, **options):
    return panel.panel(list(words), texts, list(kept), options.pop("seeds", [1]), 100, "here", machine)


def test_the_effects_of_seven_levers_are_found_in_eight_recipes(texts, capsys):
    """Lever 0 gains; 1 gains less than its steps take longer; 2 does nothing; 3 gains only in time."""
    gains = [-0.03, -0.01, 0.0, 0.0, -0.002, 0.02, 0.0]
    machine = Pretended(gains, {1: 2.0, 3: 0.5})
    effects = measure(machine, texts[:6], texts[6:])
    seen = {Path(name).stem for name in texts[:6]}
    assert sum(steps == 100 and text in seen for text, steps, _ in machine.trained) == 48
    for effect, gain in zip(effects, gains, strict=True):
        parts = [1 + 0.1 * math.sin(length) for length in range(1, 7)]
        assert effect.values["bits"] == pytest.approx([gain * part for part in parts], abs=1e-6)
    # Its mean over the six texts, with the interval of Student's t with five degrees of freedom.
    bits = np.array(effects[0].values["bits"])
    half = 2.570582 * bits.std(ddof=1) / np.sqrt(6)
    low, high = 100 * np.expm1([bits.mean() - half, bits.mean() + half])
    assert panel.told(effects[0].values["bits"]).endswith(f"({low:+.1f} to {high:+.1f})")
    times = [math.exp(np.mean(effect.values["time"])) for effect in effects]
    assert times == pytest.approx([1, 2, 1, 0.5, 1, 1, 1])
    assert np.mean(effects[1].values["equal_time"]) == pytest.approx(-0.01 - math.log(0.96), abs=1e-3)
    assert [effect.is_kept for effect in effects] == [True, False, False, True, False, False, False]
    # The kept texts are trained on last, by the base and by the kept levers together.
    last = machine.trained[-6:]
    assert {one[0] for one in last} == {texts[6][:-4], texts[7][:-4]}
    assert {one[2] for one in last} == {(), (0, 3)}
    out = capsys.readouterr().out
    assert "the kept ones, added" in out and "not seen before" in out
    result = parse_json(Path("comparisons/here/panel.json").read_text(encoding="utf-8"))
    together = np.mean(result["together"]["equal_time"])
    part = 1 + 0.05 * (math.sin(7) + math.sin(8))
    assert together == pytest.approx(-0.03 * part + math.log(0.96), abs=1e-6)


@pytest.mark.parametrize(
    ("gains", "is_kept"),
    [
        pytest.param((-0.02, -0.02, -0.02, -0.02, -0.02, 0.01), True, id="on five of six texts"),
        pytest.param((-0.04, -0.04, -0.04, -0.04, 0.01, 0.01), False, id="on four"),
        pytest.param((-0.003,) * 6, False, id="too little"),
    ],
)
def test_a_lever_is_kept_that_gains_on_nearly_all_texts(gains, is_kept):
    assert panel.Effect(panel.Lever("a", ()), {"equal_time": gains}).is_kept == is_kept


def test_it_resumes(texts):
    machine = Pretended([-0.01] * 7, {})
    first = measure(machine, texts[:2], words=WORDS[:6])
    made = len(machine.trained)
    assert made == 2 * 4 + 2
    assert measure(machine, texts[:2], words=WORDS[:6]) == first and len(machine.trained) == made


NO_DESIGNS = {
    "eight levers": ([*WORDS, "vs", "--model.x8", "1"], "at most 7 levers"),
    "a recipe": (["vs", "quick"], "a lever is options"),
    "a vocabulary": (["vs", "--model.config.vocab_size", "9"], "each text has its own"),
    "one name twice": (["vs", "--a", "1", "vs", "--b.a", "1"], "two levers are the same"),
    "no lever": ([], "two variants"),
}


@pytest.mark.parametrize(("words", "message"), NO_DESIGNS.values(), ids=NO_DESIGNS)
def test_what_is_no_design_is_refused(words, message):
    with pytest.raises(InputError, match=message):
        panel.parse_levers(words)


def test_bad_input_is_one_line(texts, capsys):
    assert panel.main(["vs", "--model.optimizer.lr", "1e-3", "--texts", "nope.txt"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("panel.py: no corpus 'nope.txt'") and err.count("\n") == 1
