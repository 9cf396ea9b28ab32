"""`gpt compare`, on runs whose results are made up; at the end one with real runs, killed and resumed."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.image import imread
from pretended import OPTIONS, Pretended, write_metrics
from processes import ROOT

from gpt.compare import trainings
from gpt.compare.command import compare
from gpt.compare.outcomes import milliseconds_per_step, read_outcome
from gpt.compare.runner import Processes, busy_warning, candidates_of, corpus_for_runs
from gpt.compare.trainings import Candidate, Text, Training, source_digest
from gpt.compare.variants import HELD_OUT, Variant, parse_variants
from gpt.data.find import named_corpus
from gpt.errors import DivergedError, InputError
from gpt.files import write_json
from gpt.pictures.runs import Metrics

LR = "quick --model.optimizer.lr 3e-3"


def compared(machine, words, texts=None, seeds=3, steps=None, name="here"):
    folder = compare(words.split(), texts, seeds, 7, steps, name, machine)
    return json.loads((folder / "result.json").read_text("utf-8"))


def noisy(change=0.0):
    """Bits of a text and seed, with noise that variants share to 0.1 %; lower by `change` of a variant.

    Twice the steps take 4 % off.
    """

    def reach(variant, text, seed, steps):
        bits = 2.0 if text == "my" else 3.0
        bits *= 1 + 0.01 * math.sin(17 * seed)
        bits *= 0.96 ** math.log2(steps / 100)
        own = np.random.default_rng(seed + len(variant)).normal(0, 0.001)
        return bits * (1 + own) * (1 - change * (variant != "quick")), 20

    return reach


@pytest.fixture(autouse=True)
def _somewhere(workplace):
    """A folder with two texts to work in."""
    for name in ("my.txt", "other.txt"):
        (workplace / name).write_text("some text\n" * 9, "utf-8")


def test_the_variants_take_turns():
    """In the end half as many steps tell what steps are worth."""
    machine = Pretended(noisy())
    compared(machine, LR, texts="my.txt,other.txt", seeds=2)
    turn = [("quick", "my"), ("lr=3e-3", "my"), ("lr=3e-3", "other"), ("quick", "other")]
    whole = [(*run, seed, 100) for seed in (7, 8) for run in turn]
    assert machine.trained == [*whole, ("quick", "my", 7, 50), ("quick", "other", 7, 50)]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (0.03, "lr=3e-3 beside quick\n  in the same steps: better by 3."),
        (0.0, "in the same steps: no difference can be seen with 4 seeds"),
    ],
    ids=["a difference that is there is found", "one that is not there is not claimed"],
)
def test_the_difference_of_a_variant_has_the_interval_of_numpy(change, line, capsys):
    result = compared(Pretended(noisy(change)), LR, texts="my.txt,other.txt", seeds=4)

    bits = {
        (run["variant"], run["text"], run["seed"]): run["bits_per_byte"]
        for run in result["runs"]
        if run["steps"] == 100
    }
    ratios = [
        [bits["lr=3e-3", text, seed] / bits["quick", text, seed] for seed in (7, 8, 9, 10)]
        for text in ("my", "other")
    ]
    table = np.log(ratios)
    half = 2.446912 * np.sqrt(table.var(axis=1, ddof=1).mean() / 8)
    expected = np.expm1([table.mean(), table.mean() - half, table.mean() + half])
    difference = result["variants"][1]["same_steps"]
    assert [difference[name] for name in ("mean", "low", "high")] == pytest.approx(expected, rel=1e-5)
    assert difference["low"] < -change < difference["high"]
    told = capsys.readouterr().out
    assert line in told and "comparisons/here/ holds comparison.png" in told
    assert imread("comparisons/here/comparison.png").shape == (540, 1200, 4)


def test_in_the_same_time_a_slower_step_costs_what_steps_are_worth(capsys):
    """Twice the steps take 4 % off: a variant whose steps take twice the time needs 4 % more to be equal."""

    def reach(variant, text, seed, steps):
        better = 0.99 if variant != "quick" else 1.0
        noise = 1 + 0.0001 * math.sin(seed * len(variant))
        return 2.0 * noise * better * 0.96 ** math.log2(steps / 100), 20.0 if better == 1 else 40.0

    result = compared(Pretended(reach), LR)
    assert result["doubling"][0] == pytest.approx(-0.04, abs=1e-3)
    variant = result["variants"][1]
    assert variant["milliseconds"]["mean"] == pytest.approx(1.0)
    assert variant["same_steps"]["mean"] == pytest.approx(-0.01, abs=1e-3)
    assert variant["same_time"]["mean"] == pytest.approx(0.99 / 0.96 - 1, abs=1e-3)
    out = capsys.readouterr().out
    assert "in the same steps: better by 1.0 %\n  in the same time: worse by 3.1 %" in out


def test_what_is_finished_is_not_run_again():
    machine = Pretended(noisy(0.01))
    first = compared(machine, LR)
    made = len(machine.trained)
    assert compared(machine, LR) == first and len(machine.trained) == made == 7
    compared(machine, LR, seeds=4)
    assert machine.trained[made:] == [("lr=3e-3", "my", 10, 100), ("quick", "my", 10, 100)]
    compared(machine, "quick vs --model.optimizer.lr 3e-3 vs --data.batch_size 6")
    assert {trained[0] for trained in machine.trained[made + 2 :]} == {"batch_size=6"}


def copy_of_the_package(folder: Path) -> Path:
    """What a researcher edits: the package and its recipes."""
    for name in ("gpt", "configs", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def edit(file: Path, pattern: str, replacement: str) -> None:
    """Replace what the pattern first matches."""
    text, count = re.subn(pattern, replacement, file.read_text("utf-8"), count=1, flags=re.S)
    assert count == 1
    file.write_text(text, "utf-8")


def test_what_was_edited_since_is_run_anew(tmp_path):
    """The variant whose source was edited; all where the text was."""
    copy = copy_of_the_package(tmp_path / "copy")
    machine = Pretended(noisy())

    def trained_again() -> list[str]:
        made = len(machine.trained)
        source_digest.cache_clear()  # of a process, in which nothing is edited
        compared(machine, "quick copy", texts="my.txt")
        return [name for name, *_ in machine.trained[made:]]

    trained_again()
    edit(copy / "gpt" / "training" / "schedule.py", "$", "\n# edited\n")
    assert trained_again() == ["copy"] * 3
    (tmp_path / "my.txt").write_text("an edited text", "utf-8")
    assert len(trained_again()) == 7


def test_what_is_tuned_from_weights_that_changed_is_run_anew(tmp_path):
    weights = tmp_path / "base" / "model.safetensors"
    weights.parent.mkdir()
    machine = Pretended(noisy(), {"quick": {"model": {"init_from": "base"}}})
    for made in (7, 11):  # the base has three of the seven, and half of one
        weights.write_bytes(b"weights" * made)
        compared(machine, LR)
        assert len(machine.trained) == made


@pytest.mark.parametrize(
    ("text", "edited"),
    [("deep", "deep/a.txt"), ("deep/*.txt", "deep/a.txt"), ("both.yaml", "other.txt")],
)
def test_an_edited_file_of_a_text_makes_it_another_one(text, edited):
    Path("deep").mkdir()
    Path("deep/a.txt").write_text("one", "utf-8")
    Path("both.yaml").write_text("corpus: {files: [my.txt, other.txt]}", "utf-8")
    before = Text.of(text).version
    assert before == Text.of(text).version != []
    Path(edited).write_text("two, and more", "utf-8")
    assert Text.of(text).version != before


def test_an_edited_corpus_file_of_the_package_makes_it_another_text(tmp_path, monkeypatch):
    """Also an edited file that it names."""
    (tmp_path / "recipes").mkdir()
    monkeypatch.setattr("gpt.data.find.shipped", lambda folder: tmp_path / folder)
    versions = []
    for names in ("[my.txt]", "[my.txt, ../other.txt]"):
        Path("recipes/mine.yaml").write_text(f"corpus: {{files: {names}}}", "utf-8")
        versions.append(Text.of("mine").version)
    Path("other.txt").write_text("two, and more", "utf-8")
    versions.append(Text.of("mine").version)
    assert all(before != after for before, after in pairwise(versions))
    assert Text.of("mine").version == versions[-1]


def test_runs_read_the_files_that_a_corpus_file_means_here(tmp_path):
    """Beside it are others of the same names, and runs have another current folder."""
    (tmp_path / "deep").mkdir()
    Path("deep/my.txt").write_text("another", "utf-8")
    Path("deep/beside.txt").write_text("some", "utf-8")
    Path("deep/both.yaml").write_text("corpus: {files: [my.txt, beside.txt], weights: [1.0, 0.5]}", "utf-8")
    corpus = corpus_for_runs(Text.of("deep/both.yaml"), tmp_path / "comparisons" / "x")
    os.chdir("deep")
    read = named_corpus(corpus)
    assert read.files == (str(tmp_path / "my.txt"), str(tmp_path / "deep" / "beside.txt"))
    assert read.weights == (1.0, 0.5)
    for name in ("my.txt", "beside.txt"):
        Path("only.yaml").write_text(f"corpus: {{files: {tmp_path / 'deep' / name}}}", "utf-8")
        assert corpus_for_runs(Text.of("only.yaml"), tmp_path) == str(tmp_path / "deep" / "only.yaml")


def test_a_text_and_a_candidate_mean_the_files_of_the_folder_where_they_are_named(tmp_path):
    """Whatever the current folder is when they are used."""
    Path("words.json").write_text("{}", "utf-8")
    named = {**OPTIONS, "data": {"vocabulary": "words.json"}, "model": {"init_from": "openai-community/gpt2"}}
    text = Text.of("my.txt")
    candidate = Candidate.of(Variant("quick", ()), named)
    assert text.corpus == str(tmp_path / "my.txt")
    assert candidate.options["data"] == {"vocabulary": str(tmp_path / "words.json")}
    assert candidate.options["model"] == {"init_from": "openai-community/gpt2"}
    assert named["data"] == {"vocabulary": "words.json"}


def test_all_runs_have_the_precision_that_is_chosen_for_the_comparison(tmp_path, monkeypatch):
    """A run's own timing of the processor could choose another for each."""
    monkeypatch.setattr(trainings, "choose_precision", lambda accelerator, given: given or "bf16-mixed")

    def precision(given):
        options = {**OPTIONS, "trainer": {"accelerator": "cpu", "precision": given}}
        candidate = Candidate.of(Variant("quick", ()), options)
        words = Training(candidate, Text.of("my.txt"), 1, 10).words(tmp_path / "c.yaml", "my.txt")
        return words[words.index("--trainer.precision") + 1]

    assert (precision(None), precision("32-true")) == ("bf16-mixed", "32-true")


def test_a_variant_that_diverges_is_said_to(capsys):
    result = compared(Pretended(lambda variant, *_: (2.0 if variant == "quick" else math.nan, 9)), LR)
    assert result["variants"][1]["same_steps"] is None
    assert "lr=3e-3 diverged" in capsys.readouterr().out
    with pytest.raises(InputError, match="the base diverged"):
        compared(Pretended(lambda *_: (math.nan, 9)), LR, name="other")


def test_a_variant_whose_run_stops_for_it_diverges(tmp_path, capsys):
    """An edited copy, whose every run ends as the guard ends one."""

    class Stopping(Pretended):
        def train(self, training, folder, watch):
            if training.candidate.variant.name == "copy":
                return Processes().train(training, folder, watch)
            super().train(training, folder, watch)

    (tmp_path / "copy" / "gpt").mkdir(parents=True)
    end = f"open('called', 'a').write('.'); print('a last line'); raise SystemExit({DivergedError.status})"
    (tmp_path / "copy" / "gpt" / "__main__.py").write_text(end, "utf-8")
    (tmp_path / "copy" / "gpt" / "__init__.py").touch()
    for _ in range(2):  # the second time it is known
        result = compared(Stopping(noisy()), "quick copy", seeds=2)
        assert result["variants"][1]["same_steps"] is None
        assert "copy diverged" in capsys.readouterr().out
    assert len(Path("comparisons/here/called").read_text("utf-8")) == 2  # one for each seed


def test_a_run_that_fails_is_no_divergence_whatever_it_prints(tmp_path):
    """Its log begins with what an earlier attempt printed."""
    (tmp_path / "copy" / "gpt").mkdir(parents=True)
    end = "import sys\nsys.exit('gpt fit: stopped before weights changed')"
    (tmp_path / "copy" / "gpt" / "__main__.py").write_text(end, "utf-8")
    (tmp_path / "copy" / "gpt" / "__init__.py").touch()
    variant = Variant("copy", (), tmp_path / "copy")
    training = Training(Candidate(variant, OPTIONS), Text.of("my.txt"), 7, 50)
    with pytest.raises(InputError, match="failed: stopped before"):
        Processes().train(training, tmp_path, lambda: None)


def test_a_text_without_a_held_out_part_is_refused(tmp_path):
    """A run has the columns of a validation all the same."""
    training = Training(Candidate(parse_variants(LR.split())[0], OPTIONS), Text.of("my.txt"), 7, 50)
    run = tmp_path / "runs" / training.name
    run.mkdir(parents=True)
    write_metrics(run, ["50,500,9,"])
    write_json(run / "summary.json", {"val_loss": None, "best_loss": None})
    with pytest.raises(InputError, match="no text is held out, give a --data"):
        read_outcome(training, tmp_path)


def test_all_variants_hold_out_what_the_base_does():
    other = {"lora": {"data": {**OPTIONS["data"], "val_fraction": 0.1, "batch_size": 3}}}
    base, lora = candidates_of(parse_variants(["quick", "lora"]), Pretended(noisy(), other))
    assert base.options["data"]["val_fraction"] is lora.options["data"]["val_fraction"] is None
    assert lora.options["data"]["batch_size"] == 3


def test_a_variant_that_changes_nothing_is_told(capsys):
    whole = {"data": {**OPTIONS["data"], **dict.fromkeys(HELD_OUT)}}
    alike = Pretended(noisy(), {"quick": {**whole, "words": []}, "lora": {**whole, "words": []}})
    candidates_of(parse_variants(["quick", "lora"]), Pretended(noisy()))
    assert capsys.readouterr().err == ""
    candidates_of(parse_variants(["quick", "lora"]), alike)
    assert "gpt compare: lora has the options and the source of quick" in capsys.readouterr().err


def test_a_base_without_steps_needs_them():
    machine = Pretended(noisy(), {"quick": {"trainer": {"max_steps": -1}}})
    with pytest.raises(InputError, match="give --steps"):
        compared(machine, LR)
    assert compared(machine, LR, steps=8)["steps"] == 8


def test_a_comma_divides_texts_of_the_command_line_and_no_name_of_a_config():
    Path("a, b.txt").write_text("some text", "utf-8")
    machine = Pretended(noisy(), {"quick": {"data": {**OPTIONS["data"], "corpus": "a, b.txt"}}})
    assert compared(machine, LR)["texts"] == [os.path.abspath("a, b.txt")]
    texts = compared(machine, LR, texts="my.txt,other.txt")["texts"]
    assert texts == [os.path.abspath(name) for name in ("my.txt", "other.txt")]


def test_two_processes_do_not_use_one_folder():
    machine = Pretended(noisy())
    train = machine.train

    def meets(training, folder, watch):
        with pytest.raises(InputError, match="in use by another process"):
            compared(Pretended(noisy()), LR)
        train(training, folder, watch)

    machine.train = meets
    compared(machine, LR)


def time_of_a_step(folder: Path, milliseconds: list[float]) -> float:
    """What is measured of steps that took these times, with a validation after the last but one."""
    rows = [f"{step},{10 * step},{1e4 / ms}," for step, ms in enumerate(milliseconds, 1)]
    rows.insert(-1, f"{len(rows) - 1},{10 * len(rows) - 10},,2.0")
    write_metrics(folder, rows)
    return milliseconds_per_step(Metrics.read(folder))


def test_the_time_of_a_step_leaves_out_start_moments_and_validations_and_counts_a_slower_last_fifth(tmp_path):
    other = [900, 10, 10]  # the machine did something else
    steady = [10, 10, 10]
    times = [500, *steady, *other, *steady, *steady, 30, 900, 30]
    assert time_of_a_step(tmp_path, times) == pytest.approx(14)
    assert time_of_a_step(tmp_path, [500, 10, 20]) == pytest.approx(15)


def test_nothing_is_said_of_the_same_time_where_times_scatter(capsys):
    """However sure the numbers look: another program slowed some of the runs."""

    def reach(variant, text, seed, steps):
        bits, milliseconds = noisy(change=0.03)(variant, text, seed, steps)
        return bits, milliseconds * (2 if seed == 8 and variant == "quick" else 1)

    compared(Pretended(reach), LR)
    out = capsys.readouterr().out
    assert "better by 3." in out and "in the same time: nothing can be said" in out


BAD = {
    "no such file": ("quick nope.yaml", "no such file"),
    "an unknown option": ("quick --model.optimizer.lrr 1", "did you mean --model.optimizer.lr?"),
    "no number": (f"{LR} --seeds many", "--seeds"),
    "one seed": (f"{LR} --seeds 1", "seeds must be at least 2"),
    "no steps": (f"{LR} --steps 0", "steps must be at least 2"),
    "a path": (f"{LR} --name ../a", "plain folder name"),
    "two texts of a name": (f"{LR} --texts a.txt,b/../a.txt,a.txt", "names that differ"),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(words, message, refusal):
    error = refusal(f"compare {words}")
    assert message in error and error.startswith("gpt compare: ")
    assert not Path("comparisons").exists()


RECIPE = """
model:
  compile: false
  config: {vocab_size: 300, context_length: 16, emb_dim: 32, num_heads: 2, num_layers: 1}
data: {vocabulary: null, batch_size: 37}
trainer: {accelerator: cpu, precision: 32-true, logger: csv, val_check_interval: 7}
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_a_comparison_that_is_killed_goes_on_where_it_was(tmp_path):
    """With real runs, of this source and of a copy with another default and a learning rate of zero."""
    copy = copy_of_the_package(tmp_path / "copy")
    edit(copy / "gpt" / "run" / "options.py", "log_every: int = 20", "log_every: int = 21")
    body = r"(def learning_rate_factor\(.*?\"\"\".*?\"\"\")"
    edit(copy / "gpt" / "training" / "schedule.py", body, r"\1\n    return 0.0")
    Path("tiny.yaml").write_text(RECIPE, "utf-8")
    words = "compare tiny.yaml copy --texts text.txt --seeds 2 --steps 400 --name here"
    command = [sys.executable, "-m", "gpt", *words.split()]
    options = {"env": {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    options |= {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    here = Path("comparisons/here")
    runs = here / "runs"
    with subprocess.Popen(command, **options) as process:
        while not list(runs.glob("copy*/metrics.csv")) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 143
    (cut,) = runs.glob("copy-*.log")
    assert "SIGTERM: stopped after step" in cut.read_text("utf-8")
    first = next(runs.glob("tiny-*/summary.json"))
    ended = first.stat().st_mtime_ns
    done = subprocess.run(command, **options, check=False)
    assert done.returncode == 0, done.stderr
    assert first.stat().st_mtime_ns == ended
    assert re.search(r"resuming .*after step \d+", cut.read_text("utf-8"))
    assert "copy beside tiny\n  in the same steps: worse by" in done.stdout
    assert len(json.loads((here / "result.json").read_text("utf-8"))["runs"]) == 5
    configs = [next((here / "variants").glob(f"{name}-*.yaml")) for name in ("tiny", "copy")]
    assert [yaml.safe_load(config.read_text("utf-8"))["log_every"] for config in configs] == [20, 21]


def test_a_busy_machine_is_reported():
    warning = busy_warning(3.2, 2)
    assert warning and "a load of 3.2 for 2 cores" in warning
    assert busy_warning(0.9, 2) is None


@pytest.mark.parametrize(
    ("texts", "seeds", "steps", "others"),
    [("other.txt", 3, 50, "texts and steps"), ("my.txt", 2, None, "seeds")],
)
def test_another_comparison_is_not_replaced(texts, seeds, steps, others):
    """Nor is the result of more seeds."""
    machine = Pretended(noisy())
    folder = compare(LR.split(), "my.txt", 3, 1337, None, None, machine)
    before = (folder / "result.json").read_bytes()
    with pytest.raises(InputError, match=f"comparison with other {others}: give this one another --name"):
        compare(LR.split(), texts, seeds, 1337, steps, None, machine)
    assert (folder / "result.json").read_bytes() == before


@pytest.mark.parametrize(("first", "second"), [("a/my.yaml", "b/my.yaml"), ("a/copy", "b/copy")])
def test_a_comparison_of_other_files_of_the_same_names_is_not_replaced(first, second, workplace):
    for folder in ("a/copy/gpt", "b/copy/gpt"):
        Path(folder).mkdir(parents=True)
        Path(folder, "__init__.py").touch()
    machine = Pretended(noisy())
    folder = compare(["quick", first], "my.txt", 2, 7, None, None, machine)
    before = (folder / "result.json").read_bytes()
    with pytest.raises(InputError, match="of a comparison with other variants: give this one another --name"):
        compare(["quick", second], "my.txt", 2, 7, None, None, machine)
    assert (folder / "result.json").read_bytes() == before
    assert compare(["quick", first], "my.txt", 2, 7, None, None, machine) == folder


def test_seeds_add_to_a_result_and_other_ones_have_their_own_folder():
    machine = Pretended(noisy())
    folder = compare(LR.split(), "my.txt", 3, 1337, None, None, machine)
    again = compare(LR.split(), "my.txt", 3, 2000, None, None, machine)
    assert again.name == f"{folder.name}-from-2000"
    assert compare(LR.split(), "my.txt", 4, 1337, None, None, machine) == folder
