"""`gpt plan`, and what plans are made from: the speed of the machine, the size of a text."""

import json
import os
import random
from pathlib import Path

import pytest
import torch

from gpt import GPT, GPTConfig
from gpt.cli import main
from gpt.cores import cores
from gpt.data.find import find_corpus
from gpt.data.prepare import Reading, prepare
from gpt.data.shards import Prepared
from gpt.data.split import SPLITS, divide_corpus
from gpt.plan import command
from gpt.plan.command import Planner, measure, measure_prepared
from gpt.plan.rule import bytes_to_read
from gpt.run.start import start
from gpt.training import speed
from gpt.training.speed import SPEEDS, Machine, speed_key

CORE = Machine(speed=3.3e11, memory=16e9, is_gpu=False)
ON_CPU = {"trainer.accelerator": "cpu", "trainer.precision": "32-true"}
PLAIN = [word for name, value in ON_CPU.items() for word in (f"--{name}", value)]


def words_of(size: int) -> str:
    """Lines of words and numbers, so many bytes of them."""
    draw = random.Random(3)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 8))) for _ in range(3000)]
    lines = [" ".join(draw.choices(words, k=20)) for _ in range(2000)]
    text = "".join(f"{number} {lines[number * 7919 % 2000]}\n" for number in range(size // 80))
    return text[:size]


@pytest.fixture
def place(workplace, monkeypatch) -> Path:
    """A text of 300 KB, a machine whose speed is known, and no GPT-2 in the hub's cache."""
    monkeypatch.setenv("GPT_CACHE", str(workplace / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(workplace / "hub"))
    Path("text.txt").write_text(words_of(300_000), "utf-8")
    Path("cache").mkdir()
    key = speed_key(torch.device("cpu"), "32-true")
    Path("cache", SPEEDS).write_text(json.dumps({key: CORE.speed}), "utf-8")
    return workplace


def test_a_table_for_several_times_promises_no_bits(place, capsys):
    assert main(["plan", "text.txt", *PLAIN, "--minutes", "10,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = lines[0].split("  ")
    assert [heading.strip() for heading in headings if heading.strip()] == [
        *("minutes", "width x layers", "parameters", "vocabulary", "context", "batch", "tokens", "epochs"),
        *("memory", "reads"),
    ]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "10"]
    assert lines[1].endswith("0.3 MB") and " GB " in lines[1]
    assert "bits" not in "".join(lines)
    assert main(["plan", "text.txt", *PLAIN, "--minutes", "soon"]) == 2
    assert "--minutes 'soon': expected a time" in capsys.readouterr().err
    assert main(["plan", "text.txt", *PLAIN, "--minutes", "0.001,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("0.001 minutes do not suffice to start: give at least 0.")
    assert lines[2].split()[0] == "1"


def test_plan_and_fit_choose_the_same(place, capsys):
    """They differ in the seconds of the start, which `gpt plan` can only suppose."""
    options = ["--model.config.num_layers", "3", "--model.config.dropout", "0.3"]
    assert main(["plan", "text.txt", *PLAIN, *options, "--minutes", "5"]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    found = start("fit", ["text.txt", *PLAIN, *options, "--minutes", "5"])
    config = found.options.model.config
    assert cells[1:4] == [str(config.emb_dim), "x", str(config.num_layers)] and config.num_layers == 3
    assert config.dropout == 0.3
    assert cells[5:8] == [
        str(n) for n in (config.vocab_size, config.context_length, found.options.data.batch_size)
    ]


def test_a_text_is_as_large_as_what_its_run_reads(place):
    """With the part that is held out, of a whole text and of one of which a part is read."""
    for most in (1 << 30, 100_000):
        found = measure(divide_corpus(find_corpus("text.txt"), most_bytes=most))
        options = {"vocabulary": "learn", "vocab_size": 300, "most_bytes": found.most_bytes}
        run = Prepared(prepare("text.txt", **options))
        sizes = [run.counts[split].bytes for split in SPLITS]
        assert found.most_bytes == (None if most > 300_000 else most)
        assert found.size == sum(sizes)
        assert found.val_fraction == pytest.approx(sizes[1] / sum(sizes), abs=1e-6)


@pytest.mark.parametrize(("size", "most"), [(300_000, 1 << 30), (3_000_000, 1 << 21)])
def test_a_plan_reads_of_each_file_the_share_that_its_run_reads(size, most, place, capsys):
    """All of a text, and a fifth of another of the same size: they are told apart by their digits."""
    Path("text.txt").write_text(words_of(size), "utf-8")
    Path("old.txt").write_text(words_of(size).translate(str.maketrans("0123456789", "#" * 10)), "utf-8")
    Path("mine.yaml").write_text("corpus: {files: [text.txt, old.txt], weights: [1, 0.2]}", "utf-8")
    found = measure(divide_corpus(find_corpus("mine.yaml"), most_bytes=most))
    assert found.size == pytest.approx(min(most, 1.2 * size), rel=0.1)
    run = Prepared(prepare("mine.yaml", vocabulary="gpt2:300", most_bytes=found.most_bytes))
    assert found.size == sum(run.counts[split].bytes for split in SPLITS)
    text = "".join(run.tokenizer.decode(run.stream(split).tokens) for split in SPLITS)
    assert text.count("#") / sum(map(str.isdigit, text)) == pytest.approx(0.2, rel=0.15)
    assert main(["plan", "mine.yaml", *PLAIN, "--minutes", "1"]) == 0
    read = float(capsys.readouterr().out.splitlines()[1].split()[-2])
    assert read == pytest.approx(1.2 * size / 1e6, rel=0.05)


def test_records_are_told_from_prose(place):
    """Also of a text that is prepared."""
    stamps = (f"12:{i // 60 % 60:02}:{i % 60:02} worker-{i % 7} took {i * i % 997} ms\n" for i in range(9000))
    Path("logs.txt").write_text("".join(stamps), "utf-8")
    prepare("logs.txt", "prepared", vocabulary="learn:400")
    assert measure(divide_corpus(find_corpus("logs.txt"))).is_regular
    assert measure_prepared(Prepared("prepared")).is_regular
    assert not measure(divide_corpus(find_corpus("text.txt"))).is_regular


def test_a_prepared_folder_is_taken_as_it_is(place, capsys):
    for name, fraction in (("half", "0.5"), ("none", "0")):
        options = ["--vocabulary", "gpt2:600", "--val_fraction", fraction]
        assert main(["prepare", "text.txt", *options, "--output", name]) == 0
    found = measure_prepared(Prepared("half"))
    assert (found.vocab_size, found.val_fraction) == (600, pytest.approx(0.5, abs=0.1))
    assert found.size == pytest.approx(300_000) and found.tokens > 50_000
    capsys.readouterr()
    assert main(["fit", "none", "--minutes", "1", *PLAIN]) == 2
    err = capsys.readouterr().err
    assert "none has fewer than 100 bytes of held-out text" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"data.vocabulary": "gpt2:700"}, 700),
        ({"data.vocabulary": "learn:600"}, 600),
        ({"model.config.vocab_size": 500}, 500),
        ({"data.vocabulary": "learn"}, None),
        ({}, None),
    ],
)
def test_a_vocabulary_by_hand_is_kept(place, options, size):
    assert (
        Planner({**ON_CPU, **options, "data.corpus": "text.txt"}, Reading()).plan(10).text.vocab_size == size
    )


def test_a_longer_text_is_read_in_part(place):
    """A power of two: what a model of this size can be trained on, and what the cores can tokenize."""
    found = bytes_to_read(CORE, 2)
    assert found == 1 << 24 and bytes_to_read(CORE, 20) > found
    slow = Machine(speed=1e8, memory=16e9, is_gpu=False)
    assert bytes_to_read(slow, 2) == 1 << 22
    fast = Machine(speed=1e15, memory=1e11, is_gpu=True)
    assert bytes_to_read(fast, 2) <= 2 * 2 * cores() * 8e6


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--minutes", "0.001"], "do not suffice to start: give at least"),
        (["--minutes", "1", "--trainer.max_steps", "5"], "leave --trainer.max_steps out"),
        (["--minutes", "1", "--trainer.accumulate_grad_batches", "4"], "accumulate_grad_batches out"),
        (["--minutes", "long"], "--minutes 'long': expected a time"),
        (["--minutes", "-1"], "--minutes -1: expected a time"),
        (["--minutes", "1", "--run", "../mine"], "expected a plain folder name for --run, got '../mine'"),
        (["--minutes", "1", "--early_stopping", "0"], "early_stopping must be at least 1, got 0"),
        (["--trainer.devices", "2"], "a run with --trainer.devices needs an end: give --trainer.max_steps"),
    ],
)
def test_what_cannot_be_planned_is_said_before_anything_is_measured(place, more, line, monkeypatch, capsys):
    monkeypatch.setattr(command, "time_machine", None)
    assert main(["fit", "text.txt", *PLAIN, *more]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1
    assert not Path("runs").exists()


def test_the_minutes_that_a_refusal_names_suffice(place, capsys):
    for more in ([], ["--data.corpus", "text.txt"]):
        assert main(["fit", "text.txt", *more, *PLAIN, "--minutes", "0.01"]) == 2
        enough = capsys.readouterr().err.split()[-1]
        assert start("fit", ["text.txt", *PLAIN, "--minutes", enough]).plan


def test_nothing_is_planned_around_zero(place, capsys):
    sizes = ("num_heads", "emb_dim", "num_layers", "vocab_size", "context_length")
    for option in (*(f"model.config.{name}" for name in sizes), "data.batch_size"):
        for name in ("plan", "fit"):
            assert main([name, "--minutes", "1", "--data.corpus", "text.txt", f"--{option}", "0"]) == 2
            line = f"gpt {name}: --{option} 0: expected a number from 1 to 1,000,000\n"
            assert capsys.readouterr().err == line


def test_a_value_of_another_type_is_answered_with_what_was_given_and_expected(capsys):
    assert main(["plan", "--model.config.dropout", "x"]) == 2
    line = "gpt plan: --model.config.dropout: expected float, got 'x'\n"
    assert capsys.readouterr().err == line


def test_a_run_without_an_end_has_two_minutes_and_says_so(place, capsys):
    found = start("fit", ["text.txt", *PLAIN])
    assert "no time and no other end is given: --minutes 2\n" in capsys.readouterr().err
    assert found.minutes == 2 and found.plan and found.options.run == "planned"
    for end in (["--config", "quick"], ["--trainer.max_steps", "5"], ["--trainer.max_time", "5s"]):
        found = start("fit", ["text.txt", *PLAIN, *end])
        assert found.minutes is None and found.options.run == "quick"
    assert capsys.readouterr().err == ""


def test_minutes_begin_with_the_command_and_not_with_the_import(place):
    """So a notebook, or a second run of a process, has all of them."""
    for began, left in ((None, 60.0), (command.time.perf_counter() - 20, 40.0)):
        found = start("fit", ["text.txt", *PLAIN, "--minutes", "1"], began=began)
        assert left - 10 < found.left <= left
        assert found.plan.seconds < left


def test_cublas_is_deterministic_before_a_plan_multiplies(place, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    found = []

    def machine(*options):
        found.append(dict(os.environ))
        return CORE

    monkeypatch.setattr(command, "time_machine", machine)
    start("fit", ["text.txt", "--minutes", "1", *PLAIN, "--trainer.deterministic", "true"])
    assert found[0]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.fixture
def weights(place) -> str:
    """Small weights in a folder, and in the hub's cache as a download of gpt2 leaves them."""
    config = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)
    model = GPT(config)
    torch.nn.init.zeros_(model.token_embedding.weight)  # each of 300 tokens is as probable
    for folder in (place / "weights", place / "hub/models--gpt2/snapshots/1"):
        model.save_pretrained(folder)
    (place / "hub/models--gpt2/refs").mkdir()
    (place / "hub/models--gpt2/refs/main").write_text("1", "utf-8")
    return "weights"


def test_weights_at_hand_stand_beside_the_plans(weights, monkeypatch, capsys):
    """Named, or downloaded before; as they are by the figure of gpt evaluate, and nothing is fetched."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    Path("text.txt").write_text(Path("text.txt").read_text("utf-8")[:40_000], "utf-8")
    options = ["plan", "text.txt", "--minutes", "1", *PLAIN]
    assert main([*options, "--model.init_from", weights]) == 0
    named = capsys.readouterr().out.splitlines()
    assert main(["evaluate", "--checkpoint", weights, "--data", "text.txt", "--split", "val"]) == 0
    bits = json.loads(capsys.readouterr().out)["bits_per_byte"]
    assert named[-1].startswith(f"weights as it is: {bits:.3f} ± ")
    assert named[-1].endswith("tune it instead: --model.init_from weights")
    assert main(options) == 0
    found = capsys.readouterr().out.splitlines()
    assert found[-1] == named[-1].replace("weights", "gpt2")
    prepare("text.txt", "own", vocabulary="learn:400")
    assert main(["plan", "own", "--minutes", "1", *PLAIN]) == 0
    assert "gpt2" not in capsys.readouterr().out
    assert main(["plan", "own", "--minutes", "1", *PLAIN, "--model.init_from", weights]) == 2
    assert "own was prepared with vocab_size 400" in capsys.readouterr().err
    (Path("hub") / "models--gpt2").rename("elsewhere")
    assert main(options) == 0
    assert "gpt2" not in capsys.readouterr().out


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_weights_beside_the_plans_compute_where_the_run_would(weights, accelerator, monkeypatch, capsys):
    """On a Mac `auto` is its GPU, which is not there."""
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: accelerator == "cpu")
    options = ["--trainer.accelerator", accelerator, "--trainer.precision", "32-true"]
    assert main(["plan", "text.txt", "--minutes", "1", *options, "--model.init_from", weights]) == 0
    assert "weights as it is: " in capsys.readouterr().out


def tuned(*options: str):
    return start(
        "fit", ["text.txt", "--minutes", "10", "--model.init_from", "weights", *PLAIN, *options]
    ).options


def test_a_tuning_reads_what_it_can_train_on_and_validates_for_a_part_of_the_time(weights):
    found = tuned("--trainer.val_check_interval", "5")
    assert (found.trainer.val_check_interval, found.trainer.max_time) == (5, "600.0s")
    assert found.data.most_bytes == 1 << round(found.data.most_bytes.bit_length() - 1) >= 1 << 16
    assert tuned("--data.most_bytes", "9999").data.most_bytes == 9999
    assert tuned().trainer.val_check_interval > 1000  # small weights take many steps
    assert tuned().early_stopping is None


def test_memory_decides_between_all_weights_and_adapters(weights, monkeypatch, capsys):
    whole = tuned()
    assert whole.model.lora.rank == 0 and "adapters" not in capsys.readouterr().err
    monkeypatch.setattr(speed, "free_memory", lambda _: 1e6)
    small = tuned()
    assert small.model.lora.rank == 8
    assert small.model.optimizer.lr == pytest.approx(10 * whole.model.optimizer.lr)
    assert " GB are free: adapters are trained" in capsys.readouterr().err
    assert tuned("--model.lora.rank", "0").model.lora.rank == 0


def write_kind(kind: str) -> str:
    """The file of a text of this kind."""
    draw = random.Random(2)
    if kind == "sparse 5 GB":
        with open("kind.txt", "wb") as file:
            file.write(words_of(10_000).encode())
            file.truncate(5 << 30)
        return "kind.txt"
    signs = "\u5929\u5730\u7384\u9ec4\u5b87\u5b99\u6d2a\u8352\u65e5\u6708\u76c8\u6603"
    records = [{"id": i, "name": f"n{i * i % 997}", "at": [i % 60, i % 7]} for i in range(4000)]
    rows = (json.dumps({"text": f"{i} is number {i * i % 997}"}) + "\n" for i in range(100_000))
    texts = {
        "dna": lambda: "".join(draw.choices("ACGT", k=100_000)),
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


KINDS = ("minified", "chinese", "2 KB", "one document", "100,000 documents", "40 MB", "sparse 5 GB")


@pytest.mark.parametrize("kind", ["dna", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)])
def test_any_text_has_a_plan_and_its_run(place, capsys, kind):
    """In the smallest form: of any size, words of any length, no blanks."""
    corpus = write_kind(kind)
    small = ["--model.config.emb_dim", "32", "--model.config.num_layers", "1", corpus]
    assert main(["plan", corpus, "--minutes", "1", *small[:-1], *PLAIN]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2
    found = start("fit", [corpus, "--minutes", "1", *small[:-1], *PLAIN])
    size = os.stat(corpus).st_size
    assert 0 < found.plan.text.size <= size
    assert (found.plan.text.most_bytes is not None) == (size > 30_000_000)
    assert ("of the text it reads" in str(found.plan)) == (size > 30_000_000)
    options = json.dumps(found.plan.options())
    Path("plan.yaml").write_text(options, "utf-8")
    steps = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    assert main(["fit", corpus, "--config", "plan.yaml", *PLAIN, *steps]) == 0
    summary = json.loads(Path("runs/planned/summary.json").read_text("utf-8"))
    assert summary["steps"] == 2 and 0 < summary["val_bits_per_byte"] < 30
