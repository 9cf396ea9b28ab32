"""Options are plain values wherever they stand: nothing that one names is imported, run or fetched."""

import os
from pathlib import Path

import pytest
import torch
import yaml
from faults.watched import watched
from processes import ROOT
from rewritten import rewritten
from tiny_runs import COMMAND, checkpoint, fit, gpt

from gpt.cli import main
from gpt.run.local import is_local
from gpt.run.options import OPTIONS, TrainerOptions
from gpt.training.module import LanguageModel

POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": "touch pwned", "shell": True}}
HOSTILE = {
    "a class": {"trainer": {"accelerator": POPEN}},
    "a name to import": {"trainer": {"accelerator": "evil_module.Strategy"}},
    "a file as a time": {"trainer": {"max_time": "evil.yaml"}},
    "a file as a group": {"trainer": "evil.yaml"},
    "a URL as the corpus": {"data": {"corpus": "https://example.org/text.txt"}},
    "a recipe with a URL": {"data": {"corpus": "evil-recipe.yaml"}},
}
UNKNOWN = {
    "model": POPEN,
    "trainer": {"plugins": "evil_module.Plugin"},
    "weights_only": False,
}


@pytest.fixture
def hostile_folder(workplace, monkeypatch):
    """Files that would leave a file `pwned`, if something ran them."""
    Path("evil_module.py").write_text("open('pwned', 'w').close()\n", encoding="utf-8")
    Path("evil.yaml").write_text(yaml.safe_dump({"accelerator": POPEN}), encoding="utf-8")
    recipe = "corpus: {files: ['https://example.org/text.txt']}\n"
    Path("evil-recipe.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.syspath_prepend(str(workplace))
    yield
    assert not Path("pwned").exists()


def with_options(run: Path, by: dict) -> Path:
    """A checkpoint in runs/evil that says that its run was made with some other options."""
    options = checkpoint(run).run.options
    for name, value in by.items():
        is_group = isinstance(value, dict)
        options[name] = {**options[name], **value} if is_group else value
    last = "checkpoints/last.safetensors"
    return rewritten(run / last, Path("runs/evil") / last, run={"options": options})


@pytest.mark.parametrize("way", ["fit --resume", "validate --ckpt_path"])
@pytest.mark.parametrize("by", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_option_of_a_checkpoint_is_refused_and_nothing_happens(
    by, way, two_steps, hostile_folder, refusal
):
    path = with_options(two_steps, by)
    with watched(Path("runs/evil")) as seen:
        err = refusal(f"{way} {path} --trainer.max_steps 3")
    assert seen == []
    assert str(path) in err


def test_options_of_a_checkpoint_that_are_unknown_are_named_and_do_nothing(two_steps, hostile_folder, capsys):
    path = with_options(two_steps, UNKNOWN)
    with watched(Path("runs"), Path(os.environ["GPT_CACHE"])) as seen:
        assert gpt(f"fit --resume {path} --trainer.max_steps 3") == 0
    assert seen == []
    names = "model.class_path, model.init_args, trainer.plugins, weights_only"
    assert f"this one does not know: {names}\n" in capsys.readouterr().err


DOUBLING = "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 26))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("trainer: !!python/object/apply:subprocess.Popen [[touch, pwned]]\n", id="code"),
        pytest.param("- 1\n", id="a list"),
        pytest.param("model: &a {config: *a}\n", id="a loop"),
        pytest.param(f"a0: &a0 [x, x]\n{DOUBLING}", id="2^25 aliases, which would take hours"),
        pytest.param("[" * 5000, id="deep"),
    ],
)
@pytest.mark.timeout(60)
def test_a_file_that_is_no_plain_options_is_one_line_at_once(text, hostile_folder, refusal):
    Path("mine.yaml").write_text(text, encoding="utf-8")
    assert len(refusal(f"{COMMAND} --config mine.yaml")) < 1000


def test_a_corpus_that_is_given_again_takes_the_place_of_a_refused_one(two_steps, workplace, refusal):
    path = with_options(two_steps, {"data": {"corpus": "hub:owner/name"}})
    resume = f"fit --resume {path} --run again --trainer.max_steps 3"
    assert "nothing that a file names is fetched: give it yourself, --data.corpus" in refusal(resume)
    assert gpt(f"{resume} --data.corpus text.txt") == 0
    assert checkpoint("again").run.step == 3


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
    ("options", "message"),
    [
        ("--trainer.accumulate_grad_batches 0", "accumulate_grad_batches must be at least 1"),
        ("--trainer.gradient_clip_val -0.5", "gradient_clip_val must be at least 0"),
        ("--trainer.val_check_interval 0", "val_check_interval must be at least 1"),
        ("--trainer.max_steps 0", "max_steps must be positive"),
        ("--trainer.max_epochs -9", "max_epochs must be positive"),
        ("--trainer.max_steps -1", "the run needs an end: give --trainer.max_steps"),
        ("--trainer.max_time=-5s", "max_time must be positive"),
        ("--trainer.max_time soon", "90s, 10m or 8h"),
        ("--trainer.logger csv,comet", "csv, tensorboard, wandb"),
        ("--trainer.devices 0", "devices must be at least 1"),
        ("--data.tokens_per_update 0", "tokens_per_update must be at least 1, got 0"),
        ("--data.tokens_per_update 384", "decides accumulate_grad_batches: give only one"),
        ("--data.batch_size 0", "batch_size must be at least 1, got 0"),
        ("--early_stopping 2 --data.val_fraction 0", "early_stopping needs held-out text"),
        ("--snapshot_megabytes -1", "snapshot_megabytes must be at least 0, got -1"),
        ("--seed_everything -1", "seed_everything must be"),
        ("--seed_everything 4294967296", "seed_everything must be"),
    ],
)
def test_what_no_run_could_follow_is_refused(options, message, workplace, refusal):
    assert message in refusal(f"{COMMAND} {options}")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({"max_steps": 100_000}, 400),
        ({"max_steps": 50}, 10),
        ({"max_steps": 2}, 1),
        ({"max_steps": 50, "val_check_interval": 50}, 50),
    ],
    ids=str,
)
def test_a_short_run_is_validated_five_times(values, steps):
    assert TrainerOptions(**values).interval == steps


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused_in_one_line(device, workplace, refusal):
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    assert device in refusal(f"{COMMAND} --trainer.accelerator {device}").lower()
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(MemoryError(), id="Python"),
        pytest.param(torch.OutOfMemoryError("no more"), id="CUDA"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), id="CPU"),
        pytest.param(RuntimeError("CUDA error: out of memory"), id="driver"),
    ],
)
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
    assert "optimizer steps to make; -1 for no such limit (default: 2000)" in out
    docs = (ROOT / "docs" / "options.md").read_text("utf-8")
    for name in OPTIONS:
        assert (f"--{name} " in out) != (f"`{name}`" in docs), name


def test_more_processes_than_cores_are_told(workplace, monkeypatch, capsys):
    monkeypatch.setattr("gpt.run.fit.cores", lambda: 0)
    assert fit("--trainer.max_steps 1") == 0
    assert "1 process on 0 cores: each waits for the others" in capsys.readouterr().err
