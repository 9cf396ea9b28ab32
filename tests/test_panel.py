"""scripts/panel.py: its design, and the effects that it finds on runs whose results are made up."""

import math
from pathlib import Path

import numpy as np
import panel
import pytest
from pretended import Pretended

from gpt.errors import InputError
from gpt.plain import parse_json

WORDS = " ".join(f"vs --model.x{number} 1" for number in range(7))
# Lever 0 gains; 1 gains less than its steps take longer; 2 does nothing; 3 gains only in time.
GAINS = (-0.03, -0.01, 0.0, 0.0, -0.002, 0.02, 0.0)
TIMES = (1, 2, 1, 0.5, 1, 1, 1)


def part(text: str) -> float:
    """How much of a lever's gain a text has."""
    return 1 + 0.1 * math.sin(len(text))


def reach(variant, text, seed, steps):
    """Each lever adds its gain to the logarithm of the bits; twice the steps take 4 % off."""
    on = [number for number in range(7) if f"x{number}=" in variant]
    logarithm = part(text) * sum(GAINS[number] for number in on) + math.log(0.96) * math.log2(steps / 100)
    return 2 * math.exp(logarithm), 20 * math.prod(TIMES[number] for number in on)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"{'a' * length}.txt" for length in range(1, 9)]
    for name in names:
        Path(name).write_text("A text of some length. " * 9000, "utf-8")
    return names


def test_the_effects_of_seven_levers_are_found_in_eight_recipes(texts):
    """The kept texts are trained on in the end, by the base and by the levers that gain."""
    machine = Pretended(reach)
    effects = panel.panel(WORDS.split(), texts[:6], texts[6:], [1], 100, "here", machine)
    for effect, gain, time in zip(effects, GAINS, TIMES, strict=True):
        expected = [gain * part("a" * length) for length in range(1, 7)]
        assert effect.values["bits"] == pytest.approx(expected, abs=1e-6)
        assert math.exp(np.mean(effect.values["time"])) == pytest.approx(time)
    assert np.mean(effects[1].values["equal_time"]) == pytest.approx(-0.01 - math.log(0.96), abs=1e-3)
    assert [effect.lever.name for effect in effects if effect.is_kept] == ["x0=1", "x3=1"]
    last = {(variant, text) for variant, text, *_ in machine.trained[-6:]}
    assert last == {(variant, "a" * length) for variant in ("panel", "x0=1+x3=1") for length in (7, 8)}
    together = parse_json(Path("comparisons/here/panel.json").read_text("utf-8"))["together"]
    gain = -0.03 * (part("a" * 7) + part("a" * 8)) / 2
    assert np.mean(together["equal_time"]) == pytest.approx(gain + math.log(0.96), abs=1e-6)


REFUSED = {
    "too many levers": (f"{WORDS} vs --model.x8 1", "at most 7 levers"),
    "what a text decides": ("vs --model.config.vocab_size 9", "each text has its own"),
    "one lever twice": ("vs --a 1 vs --b.a 1", "two levers are the same"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_design_is_refused(words, message):
    with pytest.raises(InputError, match=message):
        panel.parse_levers(words.split())


def test_bad_input_is_one_line(texts, capsys):
    assert panel.main(["vs", "--model.optimizer.lr", "1e-3", "--texts", "nope.txt"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("panel.py: no corpus 'nope.txt'") and err.count("\n") == 1
