"""Low-rank adapters: trained and saved without the weights, resumed exactly, merged on reading."""

import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rewritten import rewritten
from tiny_runs import TEXT, result

from gpt import GPT, GPTConfig
from gpt.cli import main
from gpt.errors import InputError
from gpt.training.lora import add_adapters
from gpt.weights.adapters import AdapterPart, merge
from gpt.weights.checkpoint import read, snapshots_of
from gpt.weights.load import find, load, read_weights

peft = pytest.importorskip("peft", reason="peft is not installed")

SHAPE = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=2)
FAST = [
    *("fit", "--data.corpus", "text.txt", "--trainer.accelerator", "cpu", "--trainer.precision", "32-true"),
    *("--model.config.context_length", "16", "--model.config.dropout", "0.1", "--data.batch_size", "8"),
    *("--log_every", "2", "--trainer.val_check_interval", "6", "--trainer.logger", "csv"),
    *("--trainer.max_steps", "12", "--model.optimizer.lr", "0.01", "--model.optimizer.warmup_steps", "0"),
]
LORA = ["--model.init_from", "weights", "--model.lora.rank", "4"]


def prepare(folder: Path) -> GPT:
    """Put a text, and weights to begin with, into a folder."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    torch.manual_seed(1)
    model = GPT(SHAPE)
    model.save_pretrained(folder / "weights")
    return model


@pytest.fixture
def weights(tmp_path, monkeypatch) -> GPT:
    """The weights in the current folder."""
    monkeypatch.chdir(tmp_path)
    return prepare(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a run of adapters on the weights."""
    folder = tmp_path_factory.mktemp("trained")
    prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fit(*LORA, "--run", "a")
    return folder


@pytest.fixture
def run_a(trained, tmp_path, monkeypatch):
    """A copy of it to work in."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def fit(*options):
    assert main([*FAST, *options]) == 0


def saved(run, name="last"):
    return read(f"runs/{run}/checkpoints/{name}.safetensors")


def refusal(capsys, *command) -> str:
    """The one line with which a command ends."""
    capsys.readouterr()
    assert main([*command]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_only_adapters_are_trained_and_saved(weights, optimizer):
    fit(*LORA, "--run", "a", "--model.optimizer.name", optimizer)
    adapters = saved("a").weights
    assert len(adapters) == 2 * 6 * SHAPE.num_layers
    assert {tensor.shape[0 if "lora_A" in name else 1] for name, tensor in adapters.items()} == {4}
    base = GPT.from_pretrained("runs/a/base").state_dict()
    for name, tensor in weights.state_dict().items():
        assert torch.equal(base[name], tensor), name
    tuned, _ = load("runs/a")
    changed = {name for name, tensor in tuned.state_dict().items() if not torch.equal(tensor, base[name])}
    attention = [f"attention.{name}" for name in ("W_query", "W_key", "W_value", "out_proj")]
    layers = [*attention, "feed_forward.up", "feed_forward.down"]
    assert changed == {f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in layers}


def test_a_snapshot_holds_adapters_alone_and_is_merged(run_a):
    *_, (step, _, path) = snapshots_of(Path("runs/a"))
    state = read(path).weights
    assert state.keys() == saved("a").weights.keys()
    merged, last = load(path)[0].state_dict(), load("runs/a/checkpoints/last.safetensors")[0].state_dict()
    assert step == 12
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, last[name], atol=1e-2, rtol=1e-2)


def test_a_resumed_run_equals_one_that_was_not_interrupted(weights):
    fit(*LORA, "--run", "straight", "--checkpoint_every", "4")
    fit(*LORA, "--run", "cut", "--checkpoint_every", "4")
    shutil.rmtree("weights")
    for file in ("last.safetensors", "best.safetensors", "step-12.safetensors"):
        Path("runs/cut/checkpoints", file).unlink(missing_ok=True)
    assert main(["fit", "--resume", "runs/cut"]) == 0
    assert result(Path("runs/cut")) == result(Path("runs/straight"))


def test_the_merged_model_is_the_one_that_was_trained(run_a):
    """Validation of the run, with peft's layers, and evaluation of the merged weights agree."""
    part, state = saved("a").adapters, saved("a").weights
    model = GPT.from_pretrained("runs/a/base")
    add_adapters(model, 4)
    model.load_state_dict(state, strict=False)
    tokens = torch.randint(0, 300, (2, 16))
    merged, _ = load("runs/a/checkpoints/last.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens), merged(tokens), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(merged(tokens), GPT.from_pretrained("runs/a/base")(tokens), atol=1e-2)
    assert (part.rank, part.scale) == (4, 4.0)


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--checkpoint", "runs/a", "--prompt", "The", "--max_new_tokens", "3"),
        ("evaluate", "--checkpoint", "runs/a", "--data", "text.txt"),
        ("export", "--checkpoint", "runs/a", "--format", "hf", "--output", "exported"),
        ("validate", "--ckpt_path", "runs/a"),
        ("fit", "--model.init_from", "runs/a", "--run", "next", *FAST[1:]),
    ],
    ids=lambda command: command[0],
)
def test_every_command_reads_adapters(run_a, command, capsys):
    assert main([*command]) == 0
    if command[0] == "export":
        expected, exported = read_weights(find("runs/a")), read_weights("exported")
        for name, tensor in expected.weights.items():
            assert torch.equal(tensor, exported.weights[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.lora.rank", "4"], "model.lora.rank.*init_from"),
        ([*LORA, "--model.lora.rank", "-1"], "rank must be at least 0, got -1"),
    ],
    ids=["no weights to begin with", "negative rank"],
)
def test_options_that_do_not_fit(weights, options, message, capsys):
    assert re.search(message, refusal(capsys, *FAST, *options, "--run", "a"))


@pytest.mark.parametrize("change", [{"scale": None}, {"rank": 3}], ids=["a field less", "another rank"])
def test_a_damaged_description_of_the_adapters(run_a, change, capsys):
    part = {**asdict(saved("a").adapters), **change}
    part = {name: value for name, value in part.items() if value is not None}
    wrong = "runs/a/checkpoints/wrong.safetensors"
    rewritten("runs/a/checkpoints/last.safetensors", wrong, model={"adapters": part})
    assert "wrong.safetensors" in refusal(capsys, "generate", "--prompt", "a", "--checkpoint", wrong)
    assert "wrong.safetensors" in refusal(capsys, "validate", "--ckpt_path", wrong)


def test_a_checkpoint_without_its_base(run_a, capsys):
    shutil.copy("runs/a/checkpoints/last.safetensors", "alone.safetensors")
    error = refusal(capsys, "generate", "--checkpoint", "alone.safetensors", "--prompt", "a")
    assert "holds only adapters, and the weights that they change are missing" in error
    GPT(SHAPE).save_pretrained("runs/a/base")
    for command in (["generate", "--checkpoint", "runs/a", "--prompt", "a"], ["fit", "--resume", "runs/a"]):
        assert "trained with other weights than those in" in refusal(capsys, *command)


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param({"x.lora_A": (2, 5)}, id="no B"),
        pytest.param({"x.lora_A": (2, 4), "x.lora_B": (3, 2)}, id="another width"),
        pytest.param({"x.lora_A": (2, 5), "x.lora_B": (3, 1)}, id="another rank"),
        pytest.param({"bias.lora_A": (2, 5), "bias.lora_B": (3, 2)}, id="no matrix"),
    ],
)
def test_adapters_that_do_not_fit(shapes):
    base = {"x.weight": torch.zeros(3, 5), "bias.weight": torch.zeros(3)}
    adapters = {f"{name}.default.weight": torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(InputError, match="its adapters"):
        merge(base, adapters, AdapterPart(rank=2, scale=1.0, base=""))
