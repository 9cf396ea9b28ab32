"""Options are plain values wherever they stand: nothing that one names is imported, run or fetched."""

import os
from pathlib import Path

import pytest
import torch
import yaml
from faults.watched import watched
from rewritten import rewritten
from tiny_runs import TINY, fit

from gpt.cli import main
from gpt.errors import InputError
from gpt.run.options import OPTIONS, TrainerOptions
from gpt.run.start import is_local, start
from gpt.training.module import LanguageModel
from gpt.weights.checkpoint import read

POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": "touch pwned", "shell": True}}
HOSTILE = {
    "a class": {"trainer": {"accelerator": POPEN}},
    "a name to import": {"trainer": {"accelerator": "evil_module.Strategy"}},
    "a file as a group": {"trainer": "evil.yaml"},
    "a URL as the corpus": {"data": {"corpus": "https://example.org/text.txt"}},
    "a chain of fsspec": {"data": {"corpus": "filecache::memory"}},
    "a data set of the hub": {"data": {"corpus": "hub:owner/name"}},
    "a recipe with a URL": {"data": {"corpus": "evil-recipe.yaml"}},
}
UNKNOWN = {
    "trainer.plugins": {"trainer": {"plugins": "evil_module.Plugin"}},
    "model.class_path, model.init_args": {"model": POPEN},
    "weights_only": {"weights_only": False},
}


@pytest.fixture
def hostile_folder(workplace, monkeypatch) -> Path:
    (workplace / "evil_module.py").write_text("open('pwned', 'w').close()\n", encoding="utf-8")
    (workplace / "evil.yaml").write_text(yaml.safe_dump({"accelerator": POPEN}), encoding="utf-8")
    recipe = "corpus: {files: ['https://example.org/text.txt']}\n"
    (workplace / "evil-recipe.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.syspath_prepend(str(workplace))
    return workplace


def changed(options: dict, by: dict) -> dict:
    """Nested options with some in the place of others."""
    found = dict(options)
    for name, value in by.items():
        inner = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = changed(found[name], value) if inner else value
    return found


@pytest.mark.parametrize(
    ("words", "updates"),
    [
        ("--config quick", 400),
        ("--trainer.max_steps 100000", 400),
        ("--trainer.max_steps 50", 10),
        ("--trainer.max_steps 50 --trainer.accumulate_grad_batches 4", 10),
        ("--trainer.max_steps 2", 1),
        ("--trainer.max_steps 50 --trainer.val_check_interval 50", 50),
    ],
)
def test_a_short_run_is_validated_five_times(words, updates):
    assert start("fit", words.split()).options.trainer.interval == updates


@pytest.mark.parametrize("way", ["fit --resume", "validate --ckpt_path"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_option_of_a_checkpoint_is_refused_and_nothing_happens(
    name, way, two_steps, hostile_folder, capsys
):
    last = two_steps / "checkpoints" / "last.safetensors"
    options = changed(read(last).run.options, HOSTILE[name])
    path = rewritten(last, "runs/evil/checkpoints/last.safetensors", run={"options": options})
    with watched(Path("runs/evil")) as seen:
        status = main([*way.split(), str(path), "--trainer.max_steps", "3"])
    err = capsys.readouterr().err
    assert seen == []
    assert status == 2
    assert err.count("\n") == 1
    assert str(path) in err
    assert not Path("pwned").exists()


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_option_of_a_checkpoint_that_is_unknown_is_named_and_does_nothing(
    name, two_steps, hostile_folder, capsys
):
    last = two_steps / "checkpoints" / "last.safetensors"
    options = changed(read(last).run.options, UNKNOWN[name])
    path = rewritten(last, "runs/evil/checkpoints/last.safetensors", run={"options": options})
    with watched(Path("runs"), Path(os.environ["GPT_CACHE"])) as seen:
        assert main(["fit", "--resume", str(path), "--trainer.max_steps", "3"]) == 0
    assert seen == []
    assert f"this one does not know: {name}\n" in capsys.readouterr().err
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    "text",
    [
        "trainer: !!python/object/apply:subprocess.Popen [[touch, pwned]]\n",
        "- 1\n",
        "model: &a {config: *a}\n",
        "a: &a [x, x]\n"
        + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]\n" for n in range(25)),
        "[" * 5000,
    ],
)
@pytest.mark.timeout(60)  # 2^25 aliases would take hours
def test_a_file_that_is_no_plain_options_is_one_line_at_once(text, hostile_folder, capsys):
    Path("mine.yaml").write_text(text, encoding="utf-8")
    assert main([*TINY, "--config", "mine.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and len(err) < 1000
    assert not Path("pwned").exists()


def test_a_corpus_that_is_given_again_takes_the_place_of_a_refused_one(mine, capsys):
    path = mine / "checkpoints" / "last.safetensors"
    options = changed(read(path).run.options, {"data": {"corpus": "hub:owner/name"}})
    rewritten(path, path, run={"options": options})
    more = ["fit", "--resume", str(path), "--trainer.max_steps", "3"]
    assert main(more) == 2
    assert "nothing that a file names is fetched: give it yourself, --data.corpus" in capsys.readouterr().err
    assert main([*more, "--data.corpus", "text.txt"]) == 0
    assert read(path).run.step == 3


@pytest.mark.parametrize(
    ("corpus", "local"),
    [
        ("python-docs", True),
        ("text.txt", True),
        (".", True),
        ("missing.txt", False),
        ("evil-recipe.yaml", False),
        ("evil-recipe.yaml/", False),
        ("reference://a", False),
        ("memory::text.txt", False),
        ("hub:a/b", False),
        ("../python-docs", False),
    ],
)
def test_a_name_in_a_file_leads_to_plain_text_here_or_nowhere(corpus, local, hostile_folder):
    assert is_local(corpus) == local


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"accumulate_grad_batches": 0}, "at least 1"),
        ({"gradient_clip_val": -0.5}, "at least 0"),
        ({"val_check_interval": 0}, "at least 1"),
        ({"max_steps": 0}, "positive"),
        ({"max_epochs": -9}, "positive"),
        ({"max_time": "-5s"}, "max_time must be positive"),
        ({"max_time": "soon"}, "90s, 10m or 8h"),
        ({"logger": "csv,comet"}, "csv, tensorboard, wandb"),
        ({"devices": 0}, "at least 1"),
    ],
    ids=str,
)
def test_values_that_no_run_could_follow_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        TrainerOptions(**values)


@pytest.mark.parametrize("device", ["gpu", "cuda", "mps"])
def test_a_device_that_is_not_there_is_refused_in_one_line(device, workplace, capsys):
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    assert fit("--trainer.accelerator", device) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert device in err.lower()
    assert not Path("runs").exists()


ALLOCATIONS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    MemoryError("Unable to allocate 7.28 TiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", ALLOCATIONS)
def test_a_batch_that_does_not_fit_is_one_line(error, workplace, monkeypatch, capsys):
    def step(self, *_):
        raise error

    monkeypatch.setattr(LanguageModel, "training_step", step)
    assert fit() == 2
    assert "give a smaller --data.batch_size" in capsys.readouterr().err.splitlines()[-1]


def test_the_help_is_short_and_what_is_rare_stands_in_the_docs(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    out = capsys.readouterr().out
    assert out.count("\n") <= 160 and "Elsewhere" not in out
    assert "Optimizer steps to make; -1 for no such limit (default: 2000)" in out
    docs = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
    for name in OPTIONS:
        assert (f"--{name} " in out) != (f"`{name}`" in docs), name


def test_more_processes_than_cores_are_told(workplace, monkeypatch, capsys):
    monkeypatch.setattr("gpt.run.fit.cores", lambda: 0)
    assert fit("--trainer.accelerator", "cpu", "--trainer.max_steps", "1") == 0
    assert "1 process on 0 cores: each waits for the others" in capsys.readouterr().err
