"""Low-rank adapters: trained and saved without the weights, resumed exactly, merged on reading."""

import re
import shutil
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


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A text, and weights to begin with."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    torch.manual_seed(1)
    model = GPT(SHAPE)
    model.save_pretrained("weights")
    return model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the weights, a text, and a run of adapters on them."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    torch.manual_seed(1)
    GPT(SHAPE).save_pretrained(folder / "weights")
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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_only_adapters_are_trained_and_saved(weights, optimizer):
    fit(*LORA, "--run", "a", "--model.optimizer.name", optimizer)
    state = saved("a").weights
    assert len(state) == 2 * 6 * SHAPE.num_layers
    assert {tensor.shape[0 if "lora_A" in name else 1] for name, tensor in state.items()} == {4}
    base = GPT.from_pretrained("runs/a/base").state_dict()
    for name, tensor in weights.state_dict().items():
        assert torch.equal(base[name], tensor), name
    tuned, _ = load("runs/a")
    changed = {n for n, tensor in tuned.state_dict().items() if not torch.equal(tensor, base[n])}
    assert changed == {
        f"blocks.{block}.{layer}.weight"
        for block in range(SHAPE.num_layers)
        for layer in (
            *(f"attention.{name}" for name in ("W_query", "W_key", "W_value", "out_proj")),
            *("feed_forward.up", "feed_forward.down"),
        )
    }


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
)
def test_options_that_do_not_fit(weights, options, message, capsys):
    assert main([*FAST, *options, "--run", "a"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and "Traceback" not in error


@pytest.mark.parametrize(
    "part",
    [
        {"rank": 4},
        {"rank": 3, "scale": 4.0, "base": None},
    ],
    ids=str,
)
def test_a_damaged_description_of_the_adapters(run_a, part, capsys):
    if part.get("base", "") is None:
        part["base"] = saved("a").adapters.base  # only the rank is wrong
    wrong = "runs/a/checkpoints/wrong.safetensors"
    rewritten("runs/a/checkpoints/last.safetensors", wrong, model={"adapters": part})
    for command in (["generate", "--prompt", "a", "--checkpoint"], ["validate", "--ckpt_path"]):
        capsys.readouterr()
        assert main([*command, wrong]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "wrong.safetensors" in error


def test_a_checkpoint_without_its_base(run_a, capsys, tmp_path):
    shutil.copy("runs/a/checkpoints/last.safetensors", tmp_path / "alone.safetensors")
    assert main(["generate", "--checkpoint", "alone.safetensors", "--prompt", "a"]) == 2
    assert "holds only adapters, and the weights that they change are missing" in capsys.readouterr().err
    GPT(SHAPE).save_pretrained("runs/a/base")
    for command in (["generate", "--checkpoint", "runs/a", "--prompt", "a"], ["fit", "--resume", "runs/a"]):
        assert main(command) == 2
        assert "trained with other weights than those in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "adapters",
    [
        {"x.lora_A.default.weight": (2, 5)},
        {"x.lora_A.default.weight": (2, 4), "x.lora_B.default.weight": (3, 2)},
        {"x.lora_A.default.weight": (2, 5), "x.lora_B.default.weight": (3, 1)},
        {"bias.lora_A.default.weight": (2, 5), "bias.lora_B.default.weight": (3, 2)},
    ],
    ids=str,
)
def test_adapters_that_do_not_fit(adapters):
    base = {"x.weight": torch.zeros(3, 5), "bias.weight": torch.zeros(3)}
    part = AdapterPart(rank=2, scale=1.0, base="")
    with pytest.raises(InputError, match="its adapters"):
        merge(base, {name: torch.zeros(shape) for name, shape in adapters.items()}, part)
