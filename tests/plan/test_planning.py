"""Plans for a time: the shapes they choose, the options they keep, and a run that ends when promised."""

import json
import math
import os
import random
import runpy
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from processes import ROOT
from tiny_runs import fit
from torch.optim.lr_scheduler import LambdaLR

from gpt import GPTConfig
from gpt.cli import main
from gpt.data.corpus import find_corpus
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.data.split import SPLITS, Divided
from gpt.errors import InputError
from gpt.plan import cost, recommend
from gpt.plan.cost import _LARGE, _PROBES, Shape, fit_cost
from gpt.plan.law import Law, Trial
from gpt.plan.plan import END_SECONDS, Plan, choose
from gpt.plan.text import Text, measure
from gpt.run.limits import Limits
from gpt.run.options import Options, TrainerOptions
from gpt.run.start import start
from gpt.threads import cores
from gpt.training.module import LanguageModel, ModelOptions
from gpt.training.optimizers import OptimizerConfig
from gpt.training.schedule import learning_rates
from gpt.weights.checkpoint import RunPart
from gpt.weights.load import GPT

# Seconds of a step of each probe, recorded with one thread of an AMD EPYC with bfloat16 instructions.
RECORDED = (0.0064, 0.0429, 0.0791, 0.0567, 0.0701, 0.2393, 0.1439)
MACHINE = fit_cost(list(zip(_PROBES, RECORDED, strict=True)), memory=16e9)
START = 8.0  # seconds to the first step
BYTES_PER_TOKEN = {512: 1.9, 1024: 2.3, 2048: 2.75, 4096: 3.2, 8192: 3.6, 16384: 3.9}


def text_of(size: int) -> Text:
    """A text neither hard nor easy, with the vocabularies that it supports."""
    kept = {n: each for n, each in BYTES_PER_TOKEN.items() if n * 20 <= size} or {400: 1.8}
    numbers = {"table": 64 * min(max(size // 300, 512), 4096), "unique": min(size, 1e6), "per_token": 2.3}
    numbers |= {"blocks": 49152, "context": 64, "batch": 1536, "seen": min(350_000, 4 * size)}
    law = Law.load()
    earlier = 2.5 * law.usual(**{**numbers, "seen": numbers["seen"] / 3}) / law.usual(**numbers)
    trial = Trial(
        bits_per_byte=np.full(4, 2.5),
        earlier=np.full(4, earlier),
        earlier_seen=numbers["seen"] / 3,
        repeated=0.05,
        numbers=numbers,
    )
    known = {"size": size, "val_fraction": min(0.1, 1e5 / size), "error": 0.0, "respelling": 0.0}
    return Text(**known, trial=trial, bytes_per_token=kept)


def plan(size: int, minutes: float, **given: float) -> Plan:
    names = {name.replace("__", "."): value for name, value in given.items()}
    return choose(text_of(size), MACHINE, Law.load(), minutes, names, START)


def test_the_cost_of_a_step_follows_the_timed_shapes():
    assert min(MACHINE.seconds) >= 0.0
    for shape, seconds in zip(_PROBES, RECORDED, strict=True):
        assert MACHINE.step(shape) == pytest.approx(seconds, rel=0.15)


def test_the_cost_of_a_head_has_its_softmax():
    """Recorded with two threads of an EPYC in bfloat16: narrow models with many ids, not among the probes."""
    probes = (0.0084, 0.0461, 0.0805, 0.0524, 0.0542, 0.2205, 0.1435)
    machine = fit_cost(zip(_PROBES, probes, strict=True), memory=16e9)
    recorded = {Shape(8192, 64, 64, 1, 96): 0.1506, Shape(16384, 64, 64, 1, 24): 0.074}
    recorded |= {Shape(8192, 64, 32, 1, 48): 0.0588, Shape(32768, 64, 96, 1, 48): 0.3107}
    for shape, seconds in recorded.items():
        assert machine.step(shape) == pytest.approx(seconds, rel=0.15)


def test_the_cost_of_a_step_on_a_gpu():
    """Recorded with an H200, which the small probes do not fill: shapes that are not among them."""
    small = (0.0078, 0.0195, 0.0143, 0.008, 0.0102, 0.0153, 0.0109)
    machine = fit_cost(zip(_PROBES + _LARGE, (*small, 0.0269, 0.0367, 0.0444), strict=True), memory=1e11)
    recorded = {Shape(2048, 128, 256, 3, 48): 0.0107, Shape(4096, 64, 192, 4, 24): 0.0165}
    recorded |= {Shape(8192, 256, 512, 8, 192): 0.0442, Shape(16384, 256, 768, 12, 96): 0.059}
    recorded |= {Shape(16384, 128, 256, 12, 1536): 0.1293, Shape(1024, 256, 128, 4, 384): 0.0201}
    for shape, seconds in recorded.items():
        assert machine.step(shape) == pytest.approx(seconds, rel=0.25)


@pytest.mark.parametrize(
    ("size", "minutes", "widest", "passes"),
    [
        *((20_000, 1, 128, 80), (20_000, 480, 192, 70), (200_000, 10, 256, 60), (2_000_000, 1, 256, 10)),
        *((2_000_000, 60, 640, 50), (20_000_000, 60, 640, 20), (20_000_000_000, 480, 1024, 1)),
    ],
)
def test_a_text_gets_a_model_of_its_size(size, minutes, widest, passes):
    found = plan(size, minutes)
    assert 32 <= found.shape.emb_dim <= widest
    assert found.passes <= passes
    assert found.seconds <= 60 * minutes
    assert 0.5 < found.bits_per_byte < 4.5


@pytest.mark.parametrize(("size", "vocab_size"), [(1_000_000, 2048), (1_030_000, 4096)])
def test_a_vocabulary_has_225_bytes_of_text_for_each_id(size, vocab_size):
    """A tenth is held out of both."""
    assert plan(size, 2).shape.vocab_size == vocab_size


@pytest.mark.parametrize(("minutes", "dropout"), [(0.6, 0.0), (2, 0.1), (60, 0.2)])
def test_a_text_that_the_time_allows_to_read_often_is_read_with_dropout(minutes, dropout):
    plain = plan(200_000, minutes, model__config__dropout=0.0)
    found = plan(200_000, minutes)
    assert (plain.dropout, found.dropout) == (0.0, dropout)
    assert found.options()["model"]["config"]["dropout"] == dropout
    assert (f"dropout {dropout}, " in str(found)) == bool(dropout)
    assert 0.91 * plain.bits_per_byte < found.bits_per_byte <= plain.bits_per_byte
    assert (found.bits_per_byte < 0.99 * plain.bits_per_byte) == bool(dropout)
    assert (found.passes > 1.5 * plain.passes) == bool(dropout)
    assert found.bpe_dropout and plain.seconds <= found.seconds <= 60 * minutes
    assert plan(200_000, minutes, model__config__dropout=0.3).dropout == 0.3


@pytest.mark.parametrize(
    ("rate", "minutes", "dropout"), [(1.2, 10, 0.2), (1.3, 10, 0.0), (2.4, 10, 0.0), (1.6, 60, 0.2)]
)
def test_a_text_that_is_learned_faster_than_any_measured_has_dropout_only_for_much(rate, minutes, dropout):
    """Six logs and lists were 11 % better without it in the median (docs/log.md)."""
    text = text_of(200_000)
    earlier = 2.5 * (text.trial.earlier / 2.5) ** rate
    fast = replace(text, trial=replace(text.trial, earlier=earlier))
    givens: tuple[dict[str, float], ...] = ({}, {"model.config.dropout": 0.3})
    free, told = (choose(fast, MACHINE, Law.load(), minutes, given, START) for given in givens)
    assert (free.dropout, told.dropout) == (dropout, 0.3)


def test_steps_with_dropout_take_longer():
    shape = {"model__config__emb_dim": 160, "model__config__num_layers": 2, "data__batch_size": 24}
    plain, dropped = (plan(1_000_000, 1, model__config__dropout=each, **shape) for each in (0.0, 0.1))
    assert plain.is_whole and dropped.is_whole
    assert plain.steps / dropped.steps == pytest.approx(1.3, abs=0.05)


def test_more_text_and_more_time_are_better():
    assert plan(2_000_000, 10).bits_per_byte < plan(2_000_000, 1).bits_per_byte
    assert (
        plan(2_000_000, 10).bits_per_byte < plan(200_000, 10).bits_per_byte < plan(20_000, 10).bits_per_byte
    )


def test_options_given_by_hand_are_kept():
    found = plan(2_000_000, 5, model__config__emb_dim=96, model__config__num_layers=5, data__batch_size=7)
    assert (found.shape.emb_dim, found.shape.num_layers, found.shape.batch_size) == (96, 5, 7)
    assert plan(2_000_000, 5, model__config__num_heads=2).num_heads == 2


@pytest.mark.parametrize(("width", "heads"), [(97, 1), (100, 2), (250, 5), (400, 5), (20, 1), (768, 12)])
def test_a_width_by_hand_has_heads_that_divide_it(width, heads):
    assert plan(2_000_000, 60, model__config__emb_dim=width).num_heads == heads


def test_the_minutes_that_a_refusal_names_suffice():
    for size in (3_000, 1_000_000, 37_000_000, 41_000_000, 160_000_000):
        with pytest.raises(InputError) as refused:
            plan(max(size, 20_000), 0.01)
        assert plan(max(size, 20_000), float(str(refused.value).split()[-1]))


@pytest.mark.parametrize(("slower", "count"), [(1, 5), (22, 3), (120, 2)])
def test_validations_take_a_twenty_fifth_of_the_time_or_there_are_two(slower, count):
    machine = replace(MACHINE, seconds=tuple(slower * np.array(MACHINE.seconds)))
    found = choose(text_of(12_000_000), machine, Law.load(), 10, {}, START)
    assert found.validations == count
    assert math.ceil(found.steps / found.options()["trainer"]["val_check_interval"]) == count
    assert count * found.validation <= 0.04 * 600 or count == 2
    assert (count + 1) * found.validation > 0.04 * 600 or count == 5


@pytest.mark.parametrize(("last", "best", "reached"), [(4.0, 3.0, 1.5), (4.0, 4.0, 2.0), (0.0, 0.0, 0.0)])
def test_a_run_has_reached_what_its_best_checkpoint_has(last, best, reached):
    summary = {"tokens": 9, "val_loss": last, "val_bits_per_byte": last / 2, "best_loss": best}
    found = plan(2_000_000, 5).compared(299.0, summary)
    assert found["reached"] == {"seconds": 299.0, "tokens": 9, "bits_per_byte": reached}


@pytest.mark.parametrize(("pace", "times"), [(0.1, 0.5), (0.8, 0.8), (1.0, 1.0), (1.4, 1.4)])
def test_what_is_learned_fast_is_predicted_worse(pace, times):
    known = text_of(2_000_000)
    fall = known.trial.earlier / known.trial.bits_per_byte
    text = replace(known, trial=replace(known.trial, earlier=known.trial.bits_per_byte * fall**pace))
    law = Law.load()
    planned = choose(text, MACHINE, law, 1, {}, START)
    assert planned.error == pytest.approx(times * law.error * planned.bits_per_byte)


def test_each_quarter_of_a_text_falls_at_its_own_pace():
    """What is learned fast is soon nothing, what no one can learn remains."""
    law = Law.load()
    usual = text_of(2_000_000).trial
    fall = usual.earlier[0] / usual.bits_per_byte[0]
    bits, paces = np.array([1.0, 1.0, 2.0, 6.0]), np.array([2.0, 2.0, 1.0, 0.1])
    mixed = replace(usual, bits_per_byte=bits, earlier=bits * fall**paces)
    numbers = {**usual.numbers, "seen": 1e8, "unique": 1e8}
    ratio = law.usual(**numbers, overfit=0) / law.usual(**usual.numbers)
    assert law.paces(mixed) == pytest.approx(paces)
    assert law.pace(mixed) == pytest.approx((bits * paces).sum() / 10)
    later = law.copying * mixed.repeated * -np.log(ratio)
    expected = (bits * ratio ** (paces + later)).mean()
    assert law.bits_per_byte(mixed, **numbers) == pytest.approx(expected)
    assert expected > 1.1 * 2.5 * ratio ** (law.pace(mixed) + later)  # by one pace for all of the text


def test_a_text_unlike_those_measured_is_extrapolated():
    known = text_of(2_000_000)
    assert not choose(known, MACHINE, Law.load(), 5, {}, START).extrapolates
    hard = replace(known, trial=replace(known.trial, bits_per_byte=np.full(4, 9.0)))
    assert choose(hard, MACHINE, Law.load(), 5, {}, START).extrapolates
    large = replace(known, bytes_per_token={16384: 3.5})
    assert choose(large, MACHINE, Law.load(), 5, {"model.config.emb_dim": 512}, START).extrapolates


@pytest.mark.parametrize(
    ("size", "minutes", "given", "line"),
    [
        (2_000_000, 0.1, {}, r"0.1 minutes do not suffice to start: give at least 0\.\d+"),
        (2_000_000, 1, {"model__config__emb_dim": 4096}, "1 minutes do not suffice"),
        (2_000_000, 60, {"model__config__emb_dim": 20480}, "no model fits"),
        (2_000_000, 60, {"model__config__emb_dim": 96, "model__config__num_heads": 5}, "no model fits"),
        (20_000, 60, {"model__config__context_length": 4096}, "no model fits 20,000 bytes .* four windows"),
        (2_000_000, 60, {"model__config__num_heads": 7}, "num_heads 7: .* heads that divide the width"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(size, minutes, given, line):
    with pytest.raises(InputError, match=line):
        plan(size, minutes, **given)


def test_a_text_is_measured(tmp_path, monkeypatch):
    (tmp_path / "long.txt").write_text(
        "".join(f"{n} bottles of beer on the wall\n" for n in range(9000)), "utf-8"
    )
    text = measure(str(tmp_path / "long.txt"))
    assert text.size == (tmp_path / "long.txt").stat().st_size
    assert 0 < text.trial.bits_per_byte.mean() < text.trial.earlier.mean() < 3.0
    assert (np.diff(text.trial.bits_per_byte) > 0).all()  # from the easiest quarter to the hardest
    assert 64 * 512 < text.trial.numbers["table"] < 64 * text.train_bytes / 300
    monkeypatch.setattr("gpt.plan.text.try_out", lambda *_: (text.trial, text.error))
    assert measure(str(tmp_path / "long.txt"), vocabulary="gpt2:300").bytes_per_token.keys() == {300}
    assert measure(str(tmp_path / "long.txt"), vocab_size=280).bytes_per_token.keys() == {280}
    (tmp_path / "short.txt").write_text("too short", "utf-8")
    with pytest.raises(InputError, match="has fewer than 100 bytes of held-out text"):
        measure(str(tmp_path / "short.txt"))


def test_the_error_of_held_out_text_counts_bytes_whatever_its_letters_take(tmp_path, monkeypatch):
    scored = []

    def try_out(_, val, *__):
        scored.append(len(val.encode()))
        return text_of(1_000_000).trial, 0.01

    monkeypatch.setattr("gpt.plan.text.try_out", try_out)
    monkeypatch.setattr("gpt.plan.text._SCORED", 6_000)  # characters
    (tmp_path / "text.txt").write_text("".join(f"{n} бутылок на столе\n" for n in range(20_000)), "utf-8")
    text = measure(str(tmp_path / "text.txt"))
    assert scored[0] > 8_000  # bytes
    assert text.error == pytest.approx(0.01 * (scored[0] / (text.size * text.val_fraction)) ** 0.5)


def test_without_held_out_text_a_large_text_has_no_plan(tmp_path, monkeypatch):
    """Whose sample would hold out some."""
    monkeypatch.setattr("gpt.data.split.SAMPLE_BYTES", 50_000)
    (tmp_path / "large.txt").write_text(words_of(400_000), "utf-8")
    with pytest.raises(InputError, match=r"leave --data\.val_fraction out"):
        measure(str(tmp_path / "large.txt"), val_fraction=0.0)


def words_of(size):
    """Lines of words and numbers, so many bytes of them."""
    draw = random.Random(3)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 8))) for _ in range(3000)]
    lines = [" ".join(draw.choices(words, k=20)) for _ in range(2000)]
    text = "".join(f"{number} {lines[number * 7919 % 2000]}\n" for number in range(size // 80))
    return text[:size]


def write_rows(column):
    """200 KB as rows.jsonl."""
    words = words_of(200_000)
    rows = (json.dumps({column: words[n : n + 400]}) + "\n" for n in range(0, 200_000, 400))
    Path("rows.jsonl").write_text("".join(rows), "utf-8")


@pytest.fixture
def hurry(workplace, monkeypatch):
    """A process that begins now, on a machine that is not timed but thought three times as slow as it is."""
    slow = replace(MACHINE, seconds=tuple(3 * seconds for seconds in MACHINE.seconds))
    for module in ("plan.recommend", "run.fit", "run.limits"):
        monkeypatch.setattr(f"gpt.{module}.STARTED", time.perf_counter())
    monkeypatch.setattr(recommend, "probe", lambda *_: slow)
    monkeypatch.setattr("gpt.plan.text.try_out", lambda *_: (text_of(1_000_000).trial, 0.01))
    monkeypatch.setattr(recommend, "_REST_OF_START", 0.5)
    monkeypatch.setattr(recommend, "_LEAST_SECONDS", 3.0)
    monkeypatch.setattr("gpt.plan.plan.END_SECONDS", 1.0)
    monkeypatch.setattr("gpt.run.limits.END_SECONDS", 1.0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workplace / "hub"))
    Path("text.txt").write_text(words_of(550_000), "utf-8")
    return workplace


PLAIN = ["--trainer.logger", "csv", "--trainer.accelerator", "cpu", "--data.corpus", "text.txt"]


@pytest.mark.slow
def test_a_run_keeps_its_time_and_repeats_exactly(hurry, capsys):
    began = time.perf_counter()
    small = ["--model.config.emb_dim", "32", "--model.config.num_layers", "1"]
    assert main(["fit", "--minutes", "0.2", *small, *PLAIN, "--run", "one"]) == 0
    taken = time.perf_counter() - began
    assert 8.0 < taken < 14.0
    out = capsys.readouterr()
    assert out.err.startswith("gpt fit: the plan is 32 x 1 (width x layers), ")
    assert ", reached: " in out.err
    summary = json.loads(Path("runs/one/summary.json").read_text("utf-8"))
    assert summary["planned"]["seconds"] == pytest.approx(12.0, rel=0.1)
    assert summary["reached"]["seconds"] == pytest.approx(taken, abs=0.5)
    assert summary["reached"]["tokens"] == summary["tokens"]
    options = yaml.safe_load(Path("runs/one/config.yaml").read_text("utf-8"))
    assert options["minutes"] is None
    assert options["model"]["compile"] is False  # it would take longer than it saves
    assert options["model"]["config"]["exact_gelu"] is True
    planned = options["trainer"]["max_steps"]
    windows = options["data"]["batch_size"] * options["model"]["config"]["context_length"]
    assert planned * windows == summary["planned"]["tokens"]
    assert options["model"]["config"]["emb_dim"] == 32
    assert main(["fit", "--config", "runs/one/config.yaml", "--run", "two"]) == 0  # repeats the plan
    assert json.loads(Path("runs/two/summary.json").read_text("utf-8"))["steps"] == planned
    capsys.readouterr()
    assert main(["fit", "--resume", "runs/one"]) == 0
    assert f"all {summary['steps']} steps are done" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--minutes", "0.001"], "do not suffice to start: give at least"),
        (["--minutes", "1", "--trainer.max_steps", "5"], "leave --trainer.max_steps out"),
        (["--minutes", "1", "--trainer.accumulate_grad_batches", "4"], "accumulate_grad_batches out"),
        (["--minutes", "long"], "--minutes 'long': expected a time"),
        (["--minutes", "-1"], "--minutes -1: expected a time"),
    ],
)
def test_minutes_that_cannot_be_planned(hurry, more, line, capsys):
    assert main(["fit", *PLAIN, *more]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("run", "../mine", "expected a plain folder name for --run, got '../mine'"),
        ("early_stopping", "0", "early_stopping must be at least 1, got 0"),
        ("data.bpe_dropout", "3", "bpe_dropout must be in [0, 1], got 3.0"),
        ("model.optimizer.lr", "-1", "lr must be at least 0, got -1.0"),
        ("trainer.val_check_interval", "0", "val_check_interval must be at least 1, got 0"),
        ("trainer.accelerator", "gpu", "there is no device gpu here, expected auto or one of cpu"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(hurry, option, value, line, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(recommend, "probe", None)
    monkeypatch.setattr(recommend, "measure", None)
    assert main(["fit", *PLAIN, "--minutes", "1", f"--{option}", value]) == 2
    assert capsys.readouterr().err == f"gpt fit: {line}\n"


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("data.batch_size", "batch_size must be at least 1, got 0"),
        ("model.config.context_length", "context_length must be at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("minutes", [[], ["--minutes", "1"]])
def test_nothing_is_tuned_around_zero(hurry, option, line, minutes, model, monkeypatch, capsys):
    model.save_pretrained("weights")
    monkeypatch.setattr(recommend, "probe", None)
    assert main(["fit", *PLAIN, *minutes, "--model.init_from", "weights", f"--{option}", "0"]) == 2
    assert capsys.readouterr().err == f"gpt fit: {line}\n"


def test_a_value_of_another_type_is_answered_with_what_was_given_and_expected(capsys):
    assert main(["plan", "--model.config.dropout", "x"]) == 2
    line = "gpt plan: --model.config.dropout: expected float. Got value: x (see 'gpt plan --help')\n"
    assert capsys.readouterr().err == line


def test_what_cannot_fit_is_said_before_anything_is_measured(hurry, monkeypatch, capsys):
    monkeypatch.setattr(recommend, "probe", None)
    monkeypatch.setattr(recommend, "measure", None)
    with open("large.txt", "wb") as file:
        file.truncate(300_000_000)
    assert main(["fit", "--minutes", "0.1", *PLAIN, "--data.corpus", "large.txt"]) == 2
    assert "0.1 minutes do not suffice to start: give at least 0.2" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.0, 2, 2), (0.4, 3, 40)])
def test_a_slow_machine_times_two_steps_of_each_shape(monkeypatch, seconds, least, most):
    """Others as many as there is time for; the first, which is slow, counts in neither case."""
    made = dict.fromkeys(map(str, _PROBES), 0)

    def step(shape: str) -> None:
        made[shape] += 1
        time.sleep(0.03 if made[shape] == 1 else 0.001)

    monkeypatch.setattr(cost, "_TIMED", seconds)
    monkeypatch.setattr(cost, "_step", lambda shape, *_: partial(step, str(shape)))
    found = cost.probe(torch.device("cpu"), "32-true")
    (count,) = set(made.values())
    assert least <= count <= most
    assert found.step(_PROBES[0]) < 0.015


def test_other_programs_are_noticed(monkeypatch, capsys):
    """Time in which a process waits for a core is time in which it computes nothing."""
    monkeypatch.setattr(cost, "_step", lambda *_: partial(time.sleep, 0.02))
    cost.probe(torch.device("cpu"), "32-true")
    assert "other programs took" in capsys.readouterr().err


def test_cublas_is_deterministic_before_a_plan_multiplies(hurry, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    found = []
    monkeypatch.setattr(recommend, "probe", lambda *_: found.append(dict(os.environ)) or MACHINE)
    start("fit", ["--minutes", "1", *PLAIN, "--trainer.deterministic", "true"])
    assert found[0]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_plan_resumes_nothing(hurry, capsys):
    assert fit("--run", "r", "--trainer.max_steps", "2") == 0
    for name in ("ckpt_path", "resume"):
        capsys.readouterr()
        assert main(["fit", *PLAIN, "--minutes", "1", f"--{name}", "runs/r"]) == 2
        assert f"leave --{name} out" in capsys.readouterr().err


def test_a_table_for_several_times(hurry, capsys):
    assert main(["plan", "text.txt", "--minutes", "10,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("minutes  width x layers")
    assert [line.split()[0] for line in lines[1:3]] == ["1", "10"]
    assert lines[1].split()[-2] == "±"
    assert main(["plan", "--data.corpus", "text.txt", "--minutes", "soon"]) == 2
    assert "--minutes 'soon': expected a time" in capsys.readouterr().err
    assert main(["plan", "--data.corpus", "text.txt", "--minutes", "0.001,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("0.001 minutes do not suffice to start: give at least 0.")
    assert lines[2].split()[0] == "1"


@pytest.fixture
def weights(hurry):
    """Small weights in a folder, and in the hub's cache as a download of gpt2 leaves them."""
    config = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)
    model = GPT(config)
    torch.nn.init.zeros_(model.token_embedding.weight)  # each of 300 tokens is as probable
    for folder in (hurry / "weights", hurry / "hub/models--gpt2/snapshots/1"):
        model.save_pretrained(folder)
    (hurry / "hub/models--gpt2/refs").mkdir()
    (hurry / "hub/models--gpt2/refs/main").write_text("1", "utf-8")
    return "weights"


def test_weights_at_hand_stand_beside_the_plans(weights, monkeypatch, capsys):
    """Named, or downloaded before; as they are by the figure of gpt evaluate, and nothing is fetched."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    Path("text.txt").write_text(Path("text.txt").read_text("utf-8")[:40_000], "utf-8")
    options = ["plan", "text.txt", "--minutes", "1,10"]
    assert main([*options, "--model.init_from", weights]) == 0
    named = capsys.readouterr().out.splitlines()
    assert main(["evaluate", "--checkpoint", weights, "--data", "text.txt", "--split", "val"]) == 0
    bits = json.loads(capsys.readouterr().out)["bits_per_byte"]
    assert named[3].startswith(f"weights as it is: {bits:.3f} ± ")
    assert (
        named[4] == f"weights tuned for 1, 10 minutes: less than {bits:.3f}; how much less is not predicted"
    )
    assert main(options) == 0
    found = capsys.readouterr().out.splitlines()
    assert found[3:] == [line.replace("weights", "gpt2") for line in named[3:]]
    prepare("text.txt", "own", vocabulary="learn:400")
    assert main(["plan", "own", "--minutes", "1,10"]) == 0
    assert "gpt2" not in capsys.readouterr().out
    assert main(["plan", "own", "--minutes", "1", "--model.init_from", weights]) == 2
    assert "own was prepared with vocab_size 400" in capsys.readouterr().err
    (Path("hub") / "models--gpt2").rename("elsewhere")
    assert main(options) == 0
    assert "gpt2" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bits", "take"),
    [
        (1.0, "tune w: --model.init_from w"),
        (9.0, "with 1 minutes or more train from scratch, with less tune w: --model.init_from w"),
    ],
)
def test_what_is_expected_to_be_better_is_recommended(hurry, monkeypatch, capsys, bits, take):
    monkeypatch.setattr(recommend, "score_sample", lambda *_, **options: (bits, 0.01))
    assert main(["plan", "text.txt", "--minutes", "1,10", "--model.init_from", "w"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == take


def test_within_the_error_of_a_prediction_weights_are_tuned(hurry, monkeypatch):
    """They get better with each minute, and a plan may stay above what it promises."""
    found = plan(2_000_000, 1)
    monkeypatch.setattr(recommend, "score_sample", lambda *_, **options: (bits, 0.01))
    given = dict.fromkeys(["data.val_fraction", "data.text_column", "model.config.context_length"])
    for far, scratch in ((0.9, False), (1.1, True)):
        bits = found.bits_per_byte + far * found.error
        *_, take = recommend.beside("w", {**given, "data.corpus": "text.txt"}, [found])
        assert ("train from scratch" in take) is scratch


def tuned(*options: str) -> Options:
    return start("fit", ["--minutes", "10", "--model.init_from", "weights", *PLAIN, *options]).options


def test_memory_decides_between_all_weights_and_adapters(weights, monkeypatch, capsys):
    whole = tuned()
    assert whole.model.lora.rank == 0 and "adapters" not in capsys.readouterr().err
    monkeypatch.setattr(recommend, "probe", lambda *_: replace(MACHINE, memory=1e6))
    small = tuned()
    assert small.model.lora.rank == 8
    assert small.model.optimizer.lr == pytest.approx(10 * whole.model.optimizer.lr)
    assert " GB are free: adapters are trained" in capsys.readouterr().err
    assert tuned("--model.lora.rank", "0").model.lora.rank == 0
    assert "adapters" not in capsys.readouterr().err


def test_a_tuning_reads_what_it_can_train_on_and_validates_for_a_part_of_the_time(weights, monkeypatch):
    """Steps of a second have 1,024 tokens, 4,096 bytes: 600 of them have two megabytes, and of these 145,000
    bytes are held out, 35 batches.
    """
    per_step = tuple(float(kind == 4) for kind in range(7))
    monkeypatch.setattr(recommend, "probe", lambda *_: cost.Cost(seconds=per_step, memory=1e12))
    found = tuned("--trainer.val_check_interval", "5")
    assert found.data.most_bytes == 1 << 21
    assert found.trainer.val_check_interval == 5
    slow = tuned("--data.batch_size", "1")
    assert slow.data.most_bytes == 1 << 16
    assert tuned().trainer.val_check_interval > 1000  # small weights take many steps
    monkeypatch.setattr("gpt.run.start._TUNING_STEPS", 1)
    assert tuned().trainer.val_check_interval == round(2 * 100 * 2**10.5 / 4096)
    assert tuned("--data.most_bytes", "9999").data.most_bytes == 9999


@pytest.mark.parametrize(
    ("accelerator", "more", "device", "precision"),
    [("auto", [], "mps", "32-true"), ("cpu", ["--trainer.precision", "bf16-mixed"], "cpu", "bf16-mixed")],
)
def test_a_plan_times_the_device_and_the_precision_of_the_run(
    hurry, monkeypatch, accelerator, more, device, precision
):
    """On a Mac that is its GPU."""
    timed = []
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr(recommend, "probe", lambda *chosen: timed.append(chosen) or MACHINE)
    start("fit", ["--minutes", "1", *PLAIN, "--trainer.accelerator", accelerator, *more])
    ((chosen, found),) = timed
    assert (chosen.type, found) == (device, precision)


def test_a_steps_memory_has_the_logits_of_a_gpus_chunk():
    """Those of 8,192 rows, whatever the batch: half and twice as many tokens."""
    few, many, more = (cost.Shape(30_000, 64, 32, 1, windows) for windows in (64, 128, 256))
    rest = 2 * 64 * 64 * 32 * (36 + 8)  # the activations of 64 windows
    assert many.memory() - few.memory() == pytest.approx(8 * 4096 * 30_000 + rest)
    assert more.memory() - many.memory() == pytest.approx(2 * rest)


def test_nothing_is_planned_around_zero(hurry, capsys):
    sizes = ("num_heads", "emb_dim", "num_layers", "vocab_size", "context_length")
    for option in (*(f"model.config.{name}" for name in sizes), "data.batch_size"):
        for command in ("plan", "fit"):
            assert main([command, "--minutes", "1", "--data.corpus", "text.txt", f"--{option}", "0"]) == 2
            line = f"gpt {command}: --{option} 0: expected a number from 1 to 1,000,000\n"
            assert capsys.readouterr().err == line


def test_a_text_is_read_as_the_options_say(hurry, capsys):
    write_rows("story")
    options = ["--minutes", "1", "--data.corpus", "rows.jsonl"]
    assert main(["plan", *options, "--data.text_column", "story"]) == 0
    assert main(["plan", *options]) == 2
    assert len(capsys.readouterr().out.splitlines()) >= 2
    given = start("fit", [*options, "--data.text_column", "story"])
    assert given.plan and given.plan.text.size >= 150_000


def test_a_prepared_folder_is_neither_tokenized_nor_divided_again(hurry, capsys):
    write_rows("text")
    for name, fraction in (("half", "0.5"), ("none", "0")):
        prepare = ["prepare", "rows.jsonl", "--vocabulary", "gpt2:600", "--val_fraction", fraction]
        assert main([*prepare, "--output", name]) == 0
    text = measure("half")
    assert text.val_fraction == pytest.approx(0.5, abs=0.1)
    assert text.tokenizing == 0.0
    huge = replace(text, size=20_000_000_000, val_fraction=1e-6)
    assert choose(huge, MACHINE, Law.load(), 10, {}, START).seconds <= 600
    capsys.readouterr()
    assert main(["fit", "--minutes", "1", *PLAIN, "--data.corpus", "none"]) == 2
    err = capsys.readouterr().err
    assert "held-out text" in err and "none" in err and err.count("\n") == 1


@pytest.mark.parametrize("fast", [False, True])
def test_the_speed_decides_the_number_of_steps(monkeypatch, capsys, fast):
    """A tenth of a second is planned for a step, but each takes a fifth: half of the steps fit.

    From half-way on another process slows it down; validations of two seconds each are counted in. On a fast
    machine there are more steps.
    """
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: 7.0 + now)
    trainer = TrainerOptions(max_steps=600, val_check_interval=100)
    run, changes = RunPart(), dict[int, int]()
    monkeypatch.setattr("gpt.run.limits.STARTED", 7.0 + END_SECONDS)
    plan = SimpleNamespace(validation=2.0, is_whole=True)
    limits = Limits(Options(trainer=trainer), run, plan, 1.0)
    limits.count(0)
    limits.begin()
    while not limits.is_over:
        run.step, now = run.step + 1, now + (0.04 if fast else 0.2 if now < 30 else 0.4)
        before = run.total
        limits.update(now)
        if run.total != before:
            changes[run.step] = run.total
        if run.step % 100 == 0 or limits.is_over:
            now += 2.0
            limits.paused(2.0)
    step = run.step
    assert now == pytest.approx(60.0, rel=0.01)
    err = capsys.readouterr().err
    assert "steps in the time, not 600" in err and err.count("in the time") == 1
    if fast:
        assert step == run.total > 900
        return
    first = min(changes)
    assert first == 30 and 200 <= changes[first] < 300  # as soon as a tenth of the time is over
    assert 200 < step == run.total < 215
    saved = RunPart(step=31, total=changes[first], seconds=7.0)  # a checkpoint after the first change
    again = Limits(Options(trainer=trainer), saved)
    again.count(0)
    again.begin()
    saved.step = 32
    again.update(9.0)
    assert saved.total == changes[first]


def test_slow_first_steps_do_not_change_the_number_of_steps(monkeypatch, capsys):
    """Those of the first two seconds take twice as long as planned, all others as long."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: 7.0 + now)
    monkeypatch.setattr("gpt.run.limits.STARTED", 7.0 + END_SECONDS)
    trainer = TrainerOptions(max_steps=586, val_check_interval=1000)
    run = RunPart()
    plan = SimpleNamespace(validation=0.0, is_whole=True)
    limits = Limits(Options(trainer=trainer), run, plan, 1.0)
    limits.count(0)
    limits.begin()
    while not limits.is_over:
        run.step, now = run.step + 1, now + (0.2 if now < 2 else 0.1)
        limits.update(now)
        assert run.total == 586
    assert "in the time" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("planned", "real", "steps", "says"),
    [
        (1.5, 1.5, 545, None),
        (1.2, 1.5, 545, "in the time"),
        (2.0, 1.5, 545, "in the time"),
        (1.5, 1.5, 125, "still gains, 250 steps"),  # a part of the time was planned
        (1.5, 1.5, 250, "still gains, 5"),
        (2.9, 2.8, 435, "in the time"),  # 24 s for the last fifth, 1 less than planned
        (2.7, 2.8, 448, "in the time"),
    ],
)
def test_the_last_fifth_of_the_steps_takes_longer_where_ids_are_sampled(
    planned, real, steps, says, monkeypatch, capsys
):
    """Half as long again or nearly three times, as planned or not: a minute is kept."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: 7.0 + now)
    monkeypatch.setattr("gpt.run.limits.STARTED", 7.0 + END_SECONDS)
    options = Options(
        trainer=TrainerOptions(max_steps=steps, val_check_interval=steps),
        model=ModelOptions(sampled_softmax=8),
    )
    run = RunPart()
    limits = Limits(options, run, SimpleNamespace(validation=0.0, is_whole=steps > 250, slower=planned), 1.0)
    limits.count(0)
    limits.begin()
    while not limits.is_over:
        now += 0.1 if run.step < 0.8 * run.total - 0.5 else 0.1 * real
        run.step += 1
        limits.update(now)
        if run.step % steps == 0 or limits.is_over:
            limits.validated(5.0 - run.step / 1000, None, now)
    assert now == pytest.approx(60.0, rel=0.011)
    in_a_minute = 600 / (0.8 + 0.2 * real)
    assert 0.917 * in_a_minute < run.step < 1.063 * in_a_minute
    err = capsys.readouterr().err
    assert says in err if says else "steps in the time" not in err


@pytest.mark.parametrize(("ids", "least", "late"), [(4096, 1.5, 1.3), (16384, 2.5, 1.9)])
def test_a_plan_knows_what_sampling_saves(ids, least, late):
    """In its steps, not in its validations, and more of them where the vocabulary is large."""
    text = text_of(12_000_000)
    text = replace(text, bytes_per_token={ids: text.bytes_per_token[ids]})
    sizes = {"emb_dim": 96, "num_layers": 1, "context_length": 64}
    given = {"data.batch_size": 24, **{f"model.config.{name}": size for name, size in sizes.items()}}
    machines = MACHINE, replace(MACHINE, sampled_softmax=8)
    whole, sampled = (choose(text, machine, Law.load(), 10, given, START) for machine in machines)
    assert (whole.sampled_softmax, whole.slower) == (1, 1.0)
    assert sampled.options()["model"]["sampled_softmax"] == 8
    every, early, half = (machines[1].step(whole.shape, rate) for rate in (1, 8, 2))
    assert every / early > least
    assert sampled.slower == pytest.approx(half / early)
    assert sampled.slower > late
    assert whole.validation == sampled.validation
    assert sampled.steps * (0.2 * half + 0.8 * early) == pytest.approx(whole.steps * every, rel=0.01)


@pytest.mark.parametrize(
    ("losses", "ratio", "steps", "why"),
    [
        # At 200 it gains: twice as many, then all that the time allows.
        ([5.0, 4.0], 1.0, 849, "max_steps 849"),
        ([5.0, 4.0, 4.5, 4.1], 1.0, 400, "best after step 200: longer gained nothing"),
        ([5.0, 4.0, 4.5, 4.1], 0.9, 849, "max_steps 849"),  # after temperature scaling it is the lowest
        ([5.0, 5.1, 5.2, 5.3], 1.0, 800, "early stopping"),
    ],
)
def test_the_held_out_curve_decides_how_long_a_text_is_read(monkeypatch, losses, ratio, steps, why):
    """A step is a tenth of a second, and a part of the time was planned: 200 steps of a minute and a half."""
    now, seen = 0.0, iter(losses)
    monkeypatch.setattr("time.perf_counter", lambda: 7.0 + now)
    trainer = TrainerOptions(max_steps=800 if "early" in why else 200, val_check_interval=100)
    run, before = RunPart(), None
    monkeypatch.setattr("gpt.run.limits.STARTED", 7.0)
    plan = SimpleNamespace(validation=0.0, is_whole="early" in why)
    minutes = (85 + END_SECONDS) / 60
    limits = Limits(Options(trainer=trainer, early_stopping=3), run, plan, minutes)
    limits.count(0)
    limits.begin()
    while not limits.is_over:
        run.step, now = run.step + 1, now + 0.1
        limits.update(now)
        if run.step % 100 == 0 or limits.is_over:
            loss = next(seen, 4.0 - run.step / 1000)
            limits.validated(loss, before, now, ratio if run.step > 200 else 1.0)
            before = loss
    assert run.step == (steps if "early" not in why else 400)
    assert why in limits.why()


def test_the_next_step_has_the_learning_rate_of_the_new_total():
    """A run that resumes right after a change begins with it."""
    shape = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)
    module = LanguageModel(shape, OptimizerConfig(warmup_steps=0))
    module.planned_steps = 100
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = LambdaLR(optimizer, module._rate_factor)
    module.lr_schedulers = lambda: schedule
    module.first_step = 50
    module.plan(200)
    assert optimizer.param_groups[0]["lr"] == 0.75


def test_validation_takes_no_minutes(capsys):
    assert main(["validate", "--minutes", "1", "--ckpt_path", "runs/r"]) == 2
    assert "--minutes" in capsys.readouterr().err


def test_the_law_is_near_the_runs_to_which_it_was_fitted():
    """Least squares found no nearer constants: another formula is further away."""
    fit = runpy.run_path(str(ROOT / "scripts" / "scaling" / "fit.py"))
    usual = [row for row in fit["read"]() if (row.get("rate", 1.0), row["weight_decay"]) == fit["USUAL"]]
    law = Law.load()
    error = fit["errors_of"](np.log([getattr(law, name) for name in fit["START"]]), usual)
    source = np.array([row["source"] for row in usual])
    on_gpu = (source == "gpu") | ["NVIDIA" in row.get("machine", "") for row in usual]  # larger models
    regularised = source == "regularised"
    assert len(usual) > 150 and on_gpu.sum() == 26 and regularised.sum() > 40
    assert (error[~on_gpu] ** 2).mean() ** 0.5 < 0.04
    assert (error[on_gpu] ** 2).mean() ** 0.5 < 0.065
    assert (error[regularised] ** 2).mean() ** 0.5 < 0.022
    assert np.median(abs(error)) < 0.02


@pytest.mark.parametrize(
    ("size", "minutes", "dropout", "share"),
    [
        *((20_000_000, 10, 0.0, 0.0), (1_000_000, 3, 0.0, 0.05)),
        *((1_000_000, 10, 0.1, 0.05), (200_000, 10, 0.2, 0.05)),  # read 24 and 57 times
    ],
)
def test_a_text_that_is_read_often_is_spelled_anew(size, minutes, dropout, share):
    found = plan(size, minutes)
    assert (found.passes >= 4, found.dropout) == (bool(share), dropout)
    assert found.options()["data"]["bpe_dropout"] == share


@pytest.mark.parametrize(
    ("pace", "width", "vocabulary", "passes", "gain"),
    [(0.7, 160, 2048, 3.1, 0.0), (0.7, 160, 2048, 6.2, 0.027), (1.5, 128, 2048, 4.9, -0.041)],
)
def test_the_law_knows_what_spelling_anew_gains(pace, width, vocabulary, passes, gain):
    """Pairs of runs in docs/log.md, on tinyshakespeare and on a text that is learned fast."""
    law = Law.load()
    numbers = {"blocks": 24 * width**2, "table": vocabulary * width, "context": 64, "batch": 1536}
    numbers |= {"per_token": 3.0, "unique": 1e6, "seen": passes * 1e6}
    first = {**numbers, "seen": 3e5}
    fall = law.usual(**{**first, "seen": 1e5}) / law.usual(**first)
    reached = np.full(4, 2.0)
    earlier = reached * fall**pace
    trial = Trial(bits_per_byte=reached, earlier=earlier, earlier_seen=1e5, repeated=0.05, numbers=first)
    assert law.pace(trial) == pytest.approx(pace)
    plain, respelled = (law.bits_per_byte(trial, **numbers, scaled=0, respelled=each) for each in (0, 1))
    assert 1 - respelled / plain == pytest.approx(gain, abs=0.015)


@pytest.mark.parametrize(("passes", "gain"), [(10, -0.026), (20, 0.060)])
def test_the_law_knows_what_dropout_gains(passes, gain):
    """Of pairs of runs on 200,000 bytes of three texts in docs/planning.md, with BPE-dropout, the mean."""
    law = Law.load()
    numbers = {"blocks": 24 * 160**2, "table": 512 * 160, "context": 64, "batch": 1536}
    numbers |= {"per_token": 1.98, "unique": 1.8e5, "seen": passes * 1.8e5}
    reached, earlier = np.full(4, 2.0), np.full(4, 2.4)
    first = {**numbers, "seen": 3e5}
    trial = Trial(bits_per_byte=reached, earlier=earlier, earlier_seen=1e5, repeated=0.05, numbers=first)
    plain, dropped = (law.bits_per_byte(trial, **numbers, respelled=1, dropout=each) for each in (0, 0.1))
    assert 1 - (dropped / plain) ** (1 / law.pace(trial)) == pytest.approx(gain, abs=0.025)


def test_longer_runs_and_wider_models_have_lower_rates_and_large_batches_higher_ones():
    """Divided by two for each 16 times as many steps, a fourth root, and for four times the width, a root."""
    assert learning_rates(1000, 128, 1536) == learning_rates(1000, 128, 4096) == (0.009, 0.0135)
    assert learning_rates(16_000, 128, 1536) == learning_rates(1000, 512, 1536) == (0.0045, 0.00675)
    assert learning_rates(1000, 128, 4 * 4096) == (0.018, 0.027)
    found = plan(2_000_000, 10)
    taken = found.options()["model"]["optimizer"]
    assert (taken["lr"], taken["rest_lr"]) == learning_rates(
        found.steps, found.shape.emb_dim, found.shape.tokens
    )
    recipe = yaml.safe_load((ROOT / "configs" / "tinyshakespeare.yaml").read_text("utf-8"))
    assert list(taken["betas"]) == recipe["model"]["optimizer"]["betas"]


@pytest.mark.parametrize(("name", "most_bytes"), [("one.txt", 60_000), ("rows.jsonl", None)])
def test_a_plan_and_its_run_have_the_same_text_and_vocabulary(tmp_path, monkeypatch, name, most_bytes):
    monkeypatch.setattr("gpt.data.formats.PART_BYTES", 4000)
    rows = words_of(210_000).splitlines()
    lines = [json.dumps({"text": row}) for row in rows] if name == "rows.jsonl" else rows
    (tmp_path / name).write_text("\n".join(lines), "utf-8")
    found = measure(str(tmp_path / name), most_bytes=most_bytes, steps=6)
    size = max(found.bytes_per_token)
    options = {"vocabulary": "learn", "vocab_size": size, "most_bytes": found.most_bytes}
    run = Prepared(prepare(str(tmp_path / name), **options))
    assert run.tokenizer.n_vocab == size
    sizes = [run.counts[split].bytes for split in SPLITS]
    assert sum(sizes) == found.size and found.most_bytes == most_bytes
    assert sizes[1] / sum(sizes) == pytest.approx(found.val_fraction, abs=1e-9)
    divided = Divided(find_corpus(str(tmp_path / name)), None, most_bytes)
    val = "".join(piece.text for piece in divided.sample() if piece.split == "val")
    assert found.bytes_per_token[size] == pytest.approx(len(val) / len(run.tokenizer.encode(val)))
    assert found.trial.numbers["unique"] == sizes[0]


def test_the_standard_error_is_that_of_all_that_is_held_out(tmp_path, monkeypatch):
    """A sample of it has a larger one, by the root of the sizes."""
    (tmp_path / "a.txt").write_text(words_of(420_000), "utf-8")
    found = measure(str(tmp_path / "a.txt"), steps=6)
    assert 0.0005 < found.error < 0.05
    monkeypatch.setattr("gpt.plan.text._SCORED", 8000)
    monkeypatch.setattr("gpt.data.split._PART", 1000)
    assert measure(str(tmp_path / "a.txt"), steps=6).error < 2.5 * found.error  # else 4.2
    law = replace(Law.load(), error=0.03)
    planned = choose(found, MACHINE, law, 1, {}, START)
    of_law = 0.03 * max(law.pace(found.trial), 0.5)
    assert planned.error == pytest.approx(planned.bits_per_byte * math.hypot(of_law, found.error))
    assert f"{planned.bits_per_byte:.4g} ± {planned.error:.2g} bits per byte" in str(planned)
    large = replace(found, most_bytes=1 << 25)
    assert "of the text it reads 34 MB" in str(replace(planned, text=large))


def write_kind(kind):
    """The file of a text of this kind."""
    draw = random.Random(2)
    if kind == "sparse 5 GB":
        with open("kind.txt", "wb") as file:
            file.write(words_of(10_000).encode())
            file.truncate(5 << 30)
        return "kind.txt"
    signs = "\u5929\u5730\u7384\u9ec4\u5b87\u5b99\u6d2a\u8352\u65e5\u6708\u76c8\u6603"
    stamps = (
        f"12:{i // 60 % 60:02}:{i % 60:02} INFO worker-{i % 7} took {i * i % 997} ms\n" for i in range(4000)
    )
    records = [{"id": i, "name": f"n{i * i % 997}", "at": [i % 60, i % 7]} for i in range(4000)]
    rows = (json.dumps({"text": f"{i} is number {i * i % 997}"}) + "\n" for i in range(100_000))
    texts = {
        "dna": lambda: "".join(draw.choices("ACGT", k=100_000)),
        "logs": lambda: "".join(stamps),
        "minified": lambda: json.dumps(records, separators=(",", ":")),
        "chinese": lambda: "".join(draw.choices(signs, k=40_000)),
        "2 KB": lambda: words_of(2_000),
        "one document": lambda: json.dumps({"text": words_of(200_000)}),
        "100,000 documents": lambda: "".join(rows),
        "40 MB": lambda: words_of(40_000_000),
    }
    name = "kind.jsonl" if "document" in kind else "kind.txt"
    Path(name).write_text(texts[kind](), "utf-8")
    return name


KINDS = ("logs", "minified", "chinese", "2 KB", "one document", "100,000 documents", "40 MB", "sparse 5 GB")


@pytest.mark.parametrize("kind", ["dna", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)])
def test_any_text_has_a_plan_and_its_run(hurry, monkeypatch, capsys, kind):
    """In `gpt plan` and in `gpt fit`, in the smallest form: of any size, words of any length, no blanks."""
    monkeypatch.setattr(recommend, "_READ", 8e6 / cores())
    corpus = write_kind(kind)
    small = ["--model.config.emb_dim", "32", "--model.config.num_layers", "1", "--data.corpus", corpus]
    assert main(["plan", "--minutes", "3", *small]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2
    given = start("fit", ["--minutes", "3", *small])
    size = os.stat(corpus).st_size
    assert 0 < given.plan.text.size <= size
    assert (given.plan.text.most_bytes is not None) == (size > 30_000_000)
    assert ("of the text it reads" in str(given.plan)) == (size > 30_000_000)
    steps = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    options = given.plan.options()
    options["trainer"] |= {"max_steps": 2, "val_check_interval": 2}
    Path("plan.yaml").write_text(yaml.safe_dump(options), "utf-8")
    assert main(["fit", "--config", "plan.yaml", *PLAIN, "--data.corpus", corpus, *steps]) == 0
    summary = json.loads(Path("runs/planned/summary.json").read_text("utf-8"))
    assert summary["steps"] == 2 and 0 < summary["val_bits_per_byte"] < 30
    assert summary["val_standard_error"] is None or summary["val_standard_error"] >= 0
