"""`gpt plan`, and what plans are made from: the speed of the machine, the size of a text."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from known_speed import know_speed
from tiny_runs import gpt, summary

from gpt import GPT, GPTConfig
from gpt.cores import cores
from gpt.data.find import find_corpus
from gpt.data.options import DEFAULT_READING, Reading
from gpt.data.prepare import prepare, prepare_named, prepare_text
from gpt.data.prepared import Prepared
from gpt.data.split import SPLITS, divide_corpus
from gpt.plan import command
from gpt.plan.command import Planner, measure, measure_prepared
from gpt.plan.rule import bytes_to_read
from gpt.run.options import Options
from gpt.run.origin import Origin
from gpt.run.start import start
from gpt.text.tokenizer import Tokenizer
from gpt.training import speed
from gpt.training.speed import Machine

CORE = Machine(speed=3.3e11, memory=16e9)
ON_CPU = {"trainer.accelerator": "cpu", "trainer.precision": "32-true"}
PLAIN = " ".join(f"--{name} {value}" for name, value in ON_CPU.items())


def begin(command: str, **how: float | None) -> Origin:
    """What `gpt fit COMMAND` begins with on the CPU."""
    return start("fit", f"{command} {PLAIN}".split(), **how)


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
    know_speed(Path("cache"), CORE.speed)
    return workplace


@pytest.fixture
def planned(place, capsys):
    """Runs `gpt plan` and returns its lines."""

    def run(command: str, device: str = PLAIN) -> list[str]:
        capsys.readouterr()
        assert gpt(f"plan {command} {device}") == 0
        return capsys.readouterr().out.splitlines()

    return run


def test_a_table_for_several_times_promises_no_bits(planned, refusal):
    heading, *lines = planned("text.txt --minutes 10,1,0.001")
    assert heading.split()[:4] == ["minutes", "width", "x", "layers"] and "bits" not in heading
    assert lines[0].startswith("0.001 minutes do not suffice to start: give at least 0.")
    assert [line.split()[0] for line in lines[1:3]] == ["1", "10"]
    assert lines[1].endswith(" 300 kB") and " MB " in lines[1]


def test_plan_and_fit_choose_the_same(planned):
    """They differ in the seconds of the start, which `gpt plan` can only suppose."""
    command = "text.txt --minutes 5 --model.config.num_layers 3 --model.config.dropout 0.3"
    cells = planned(command)[1].split()
    options = begin(command).options
    config = options.model.config
    assert (config.num_layers, config.dropout) == (3, 0.3)
    assert cells[1:4] == [str(config.emb_dim), "x", "3"]
    assert cells[5:8] == [str(n) for n in (config.vocab_size, config.context_length, options.data.batch_size)]


@pytest.mark.parametrize(("size", "most"), [(300_000, 1 << 30), (3_000_000, 1 << 21)], ids=["all", "a part"])
def test_a_text_is_measured_as_its_run_reads_it(size, most, place, planned):
    """All of a file, and a fifth of another of the same size."""
    for name in ("text.txt", "old.txt"):
        Path(name).write_text(words_of(size), "utf-8")
    Path("mine.yaml").write_text("corpus: {files: [text.txt, old.txt], weights: [1, 0.2]}", "utf-8")
    measured = measure(divide_corpus(find_corpus("mine.yaml"), most_bytes=most))
    assert measured.size == pytest.approx(min(most, 1.2 * size), rel=0.1)
    assert measured.most_bytes == (None if most > size else most)
    run = Prepared(prepare("mine.yaml", vocabulary="gpt2:300", most_bytes=measured.most_bytes))
    sizes = [run.counts[split].bytes for split in SPLITS]
    assert measured.size == sum(sizes)
    assert measured.val_fraction == pytest.approx(sizes[1] / sum(sizes), abs=1e-6)
    *_, read, unit = planned("mine.yaml --minutes 1")[1].split()
    assert float(read) * {"kB": 1e3, "MB": 1e6}[unit] == pytest.approx(1.2 * size, rel=0.05)


def test_what_a_plan_reads_in_part_is_not_taken_for_the_whole_text(place, monkeypatch):
    """Short examples have more text than their file has bytes."""
    Path("c.csv").write_text(
        "prompt,completion\n" + "".join(f"{i},{i + 1}\n" for i in range(20_000)), "utf-8"
    )
    monkeypatch.setattr(command, "bytes_to_read", lambda *_: 300_000)
    tokenizer = Tokenizer("gpt2", vocab_size=300)
    planner = Planner({"data.corpus": "c.csv", **ON_CPU}, DEFAULT_READING)
    assert planner.plan(10).text.most_bytes == 300_000
    part, whole = prepare_text(planner.text, tokenizer), prepare_named("c.csv", tokenizer)
    examples = [sum(prepared.counts[split].documents for split in SPLITS) for prepared in (part, whole)]
    assert examples[0] < examples[1] == 20_000


def test_records_are_told_from_prose(place):
    """Also of a text that is prepared."""
    stamps = (f"12:{i // 60 % 60:02}:{i % 60:02} worker-{i % 7} took {i * i % 997} ms\n" for i in range(9000))
    Path("logs.txt").write_text("".join(stamps), "utf-8")
    prepare("logs.txt", "prepared", vocabulary="learn:400")
    assert measure(divide_corpus(find_corpus("logs.txt"))).has_records
    assert measure_prepared(Prepared("prepared")).has_records
    assert not measure(divide_corpus(find_corpus("text.txt"))).has_records


def test_short_documents_of_a_prepared_text_are_no_records(place, monkeypatch):
    """`<|endoftext|>` stands after each of them in the files, and in no text."""
    rows = [f'{{"text": "{word}"}}\n' for word in Path("text.txt").read_text("utf-8").split()[:20_000]]
    Path("words.jsonl").write_text("".join(rows), "utf-8")
    prepare("words.jsonl", "words", vocabulary="learn:400")
    texts = []
    monkeypatch.setattr(command, "_zlib_ratio", lambda pieces: texts.extend(pieces) or 1.0)
    measure_prepared(Prepared("words"))
    assert texts and "<|endoftext|>" not in texts[0]


def test_a_prepared_folder_is_taken_as_it_is(place, refusal):
    for name, fraction in (("half", 0.5), ("none", 0)):
        prepare("text.txt", name, vocabulary="gpt2:600", val_fraction=fraction)
    half = measure_prepared(Prepared("half"))
    assert (half.vocab_size, half.val_fraction) == (600, pytest.approx(0.5, abs=0.1))
    assert half.size == pytest.approx(300_000) and half.tokens > 50_000
    err = refusal(f"fit none --minutes 1 {PLAIN}")
    assert "none has fewer than 100 bytes of held-out text" in err


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"data.vocabulary": "gpt2:700"}, 700),
        ({"data.vocabulary": "learn:600"}, 600),
        ({"model.config.vocab_size": 500}, 500),
        ({"data.vocabulary": "learn"}, None),
    ],
    ids=str,
)
def test_a_vocabulary_by_hand_is_kept(place, options, size):
    planner = Planner({**ON_CPU, **options, "data.corpus": "text.txt"}, Reading())
    assert planner.plan(10).text.vocab_size == size


def test_a_longer_text_is_read_in_part():
    """What a model of this size can be trained on, and what the cores can tokenize."""
    assert bytes_to_read(CORE, 2) == 1 << 24 < bytes_to_read(CORE, 20)
    fast = Machine(speed=1e15, memory=1e11, device="cuda")
    assert bytes_to_read(fast, 2) <= 2 * 2 * cores() * 8e6


UNPLANNED = {
    "too short": ("--minutes 0.001", "do not suffice to start: give at least"),
    "an end by steps": ("--minutes 1 --trainer.max_steps 5", "leave --trainer.max_steps out"),
    "accumulation": ("--minutes 1 --trainer.accumulate_grad_batches 4", "accumulate_grad_batches out"),
    "no time": ("--minutes long", "--minutes 'long': expected a time"),
    "a negative time": ("--minutes -1", "--minutes -1: expected a time"),
    "a path": ("--minutes 1 --run ../mine", "expected a plain folder name for --run, got '../mine'"),
    "no patience": ("--minutes 1 --early_stopping 0", "early_stopping must be at least 1, got 0"),
    "devices": ("--trainer.devices 2", "a run with --trainer.devices needs an end: give --trainer.max_steps"),
    "no width": ("--minutes 1 --model.config.emb_dim 0", "emb_dim 0: expected a number from 1 to 1,000,000"),
    "all held out": ("--minutes 1 --data.val_fraction 1", "1.0: expected a number from 0 to 0.99"),
}


@pytest.mark.parametrize(("options", "message"), UNPLANNED.values(), ids=UNPLANNED)
def test_what_cannot_be_planned_is_said_before_anything_is_measured(
    place, options, message, monkeypatch, refusal
):
    monkeypatch.setattr(command, "time_machine", None)
    assert message in refusal(f"fit text.txt {PLAIN} {options}")
    assert not Path("runs").exists()


def test_a_given_batch_is_that_of_each_process(place, monkeypatch):
    alone = begin("text.txt --minutes 1 --data.batch_size 24")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(command, "of_first_process", lambda name, measure: measure())
    monkeypatch.setattr(command, "time_machine", lambda *_: replace(CORE, processes=2))
    two = begin("text.txt --minutes 1 --data.batch_size 12")
    assert two.plan.shape.batch_size == alone.plan.shape.batch_size == 24
    assert two.options.data.batch_size == 12


def test_a_limit_of_time_is_not_one_of_steps_too(place):
    """The quick recipe's number of steps does not count beside a limit that is asked for."""
    assert begin("text.txt --trainer.max_time 1h").options.trainer.max_steps == -1
    assert begin("text.txt --trainer.max_steps 7").options.trainer.max_steps == 7
    assert begin("text.txt --config quick --trainer.max_time 1h").options.trainer.max_steps == 2000


def test_the_minutes_that_a_refusal_names_suffice(place, refusal):
    enough = refusal(f"fit text.txt {PLAIN} --minutes 0.01").split()[-1]
    assert begin(f"text.txt --minutes {enough}").plan


def test_a_run_without_an_end_has_two_minutes_and_says_so(place, capsys):
    planned = begin("text.txt")
    assert "no time and no other end is given, so the run takes --minutes 2\n" in capsys.readouterr().err
    assert planned.minutes == 2 and planned.plan and planned.options.run == "planned"
    for end in ("--config quick", "--trainer.max_steps 5", "--trainer.max_time 5s"):
        unplanned = begin(f"text.txt {end}")
        assert unplanned.minutes is None and unplanned.options.run == "quick"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("ago", "left"), [(None, 60.0), (20, 40.0)])
def test_minutes_begin_with_the_command_and_not_with_the_import(place, ago, left):
    """So a notebook, or a second run of a process, has all of them."""
    began = None if ago is None else command.time.perf_counter() - ago
    begun = begin("text.txt --minutes 1", began=began)
    assert left - 10 < begun.left <= left
    assert begun.plan.seconds < left


def test_cublas_is_deterministic_before_a_plan_multiplies(place, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    settings = []

    def machine(*options):
        settings.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return CORE

    monkeypatch.setattr(command, "time_machine", machine)
    begin("text.txt --minutes 1 --trainer.deterministic true")
    assert settings == [":4096:8"]


@pytest.fixture
def weights(place) -> None:
    """Small weights in a folder, and in the hub's cache as a download of gpt2 leaves them."""
    config = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)
    model = GPT(config)
    torch.nn.init.zeros_(model.token_embedding.weight)  # each of 300 tokens is as probable
    for folder in (place / "weights", place / "hub/models--gpt2/snapshots/1"):
        model.save_pretrained(folder)
    (place / "hub/models--gpt2/refs").mkdir()
    (place / "hub/models--gpt2/refs/main").write_text("1", "utf-8")


def test_weights_at_hand_stand_beside_the_plans(weights, planned, monkeypatch, refusal, capsys):
    """Named, or downloaded before; as they are by the figure of gpt evaluate, and nothing is fetched."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    Path("text.txt").write_text(words_of(40_000), "utf-8")
    named = planned("text.txt --minutes 1 --model.init_from weights")[-1]
    assert gpt("evaluate --checkpoint weights --data text.txt --split val") == 0
    bits = json.loads(capsys.readouterr().out)["bits_per_byte"]
    assert named.startswith(f"weights as it is: {bits:.3f} ± ")
    assert named.endswith("tune it instead: --model.init_from weights")
    assert planned("text.txt --minutes 1")[-1] == named.replace("weights", "gpt2")
    prepare("text.txt", "own", vocabulary="learn:400")
    assert "gpt2" not in " ".join(planned("own --minutes 1"))
    err = refusal(f"plan own --minutes 1 {PLAIN} --model.init_from weights")
    assert "own was prepared with vocab_size 400" in err
    Path("hub/models--gpt2").rename("elsewhere")
    assert "gpt2" not in " ".join(planned("text.txt --minutes 1"))


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
def test_weights_beside_the_plans_compute_where_the_run_would(weights, planned, accelerator, monkeypatch):
    """On a Mac `auto` is its GPU, which is not there."""
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: accelerator == "cpu")
    device = f"--trainer.accelerator {accelerator} --trainer.precision 32-true"
    *_, line = planned("text.txt --minutes 1 --model.init_from weights", device)
    assert line.startswith("weights as it is: ")


def tuned(options: str = "") -> Options:
    return begin(f"text.txt --minutes 10 --model.init_from weights {options}").options


def test_a_tuning_reads_what_it_can_train_on_and_validates_for_a_part_of_the_time(weights):
    by_hand = tuned("--trainer.val_check_interval 5 --data.most_bytes 9999")
    assert (by_hand.trainer.val_check_interval, by_hand.trainer.max_time) == (5, "600.0s")
    assert by_hand.data.most_bytes == 9999
    chosen = tuned()
    most = chosen.data.most_bytes
    assert most >= 1 << 16 and most.bit_count() == 1  # a power of two
    assert chosen.trainer.val_check_interval > 1000  # small weights take many steps
    assert chosen.early_stopping == 4
    assert tuned("--early_stopping 9").early_stopping == 9


def test_memory_decides_between_all_weights_and_adapters(weights, monkeypatch, capsys):
    whole = tuned()
    assert whole.model.lora.rank == 0 and "adapters" not in capsys.readouterr().err
    monkeypatch.setattr(speed, "free_memory", lambda *_: 1e6)
    small = tuned()
    assert small.model.lora.rank == 8
    assert small.model.optimizer.lr == pytest.approx(10 * whole.model.optimizer.lr)
    assert (whole.model.optimizer.weight_decay, small.model.optimizer.weight_decay) == (0.1, 0.0)
    assert " GB are free: adapters are trained" in capsys.readouterr().err
    assert tuned("--model.lora.rank 0").model.lora.rank == 0


DNA = "".join(random.Random(2).choices("ACGT", k=100_000))
ROWS = "".join(f'{{"text": "{i} is number {i * i % 997}"}}\n' for i in range(100_000))
# A file, what it begins with, and its size where zeros follow that take no space on the disk.
TEXTS = {
    "a long word": ("text.txt", DNA, None),
    "little text": ("text.txt", words_of(2_000), None),
    "one document": ("text.jsonl", json.dumps({"text": words_of(200_000)}), None),
    "many documents": ("text.jsonl", ROWS, None),
    "5 GB": ("text.txt", words_of(10_000), 5 << 30),
}


@pytest.mark.parametrize(
    "kind", ["a long word", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(TEXTS)[1:])]
)
def test_any_text_has_a_plan_and_its_run(kind, planned):
    """In the smallest form: of any size, words of any length, no blanks."""
    corpus, text, zeros = TEXTS[kind]
    Path(corpus).write_text(text, "utf-8")
    if zeros:
        os.truncate(corpus, zeros)
    size = os.stat(corpus).st_size
    command = f"{corpus} --minutes 1 --model.config.emb_dim 32 --model.config.num_layers 1"
    assert len(planned(command)) >= 2
    plan = begin(command).plan
    assert 0 < plan.text.size <= size
    assert (plan.text.most_bytes is not None) == (size > 30_000_000)
    assert ("of the text it reads" in str(plan)) == (size > 30_000_000)
    Path("plan.yaml").write_text(json.dumps(plan.options()), "utf-8")
    steps = "--trainer.max_steps 2 --trainer.val_check_interval 2"
    assert gpt(f"fit {corpus} --config plan.yaml {PLAIN} {steps}") == 0
    assert summary("planned")["steps"] == 2
    assert 0 < summary("planned")["val_bits_per_byte"] < 30
