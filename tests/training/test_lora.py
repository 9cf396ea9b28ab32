"""Low-rank adapters: trained and saved without the weights, resumed exactly, merged on reading."""

import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rewritten import rewritten
from tiny_runs import TEXT, checkpoint, gpt, result

from gpt import GPT, GPTConfig
from gpt.errors import InputError
from gpt.training.lora import add_adapters
from gpt.weights.adapters import AdapterPart, merge
from gpt.weights.checkpoint import read
from gpt.weights.load import find, load, read_weights
from gpt.weights.runs import snapshots_of

peft = pytest.importorskip("peft", reason="peft is not installed")

SHAPE = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=2)
FAST = """fit --data.corpus text.txt --trainer.accelerator cpu --trainer.precision 32-true --log_every 2
--model.config.context_length 16 --model.config.dropout 0.1 --data.batch_size 8 --trainer.logger csv
--trainer.val_check_interval 6 --trainer.max_steps 12 --model.optimizer.lr 0.01
--model.optimizer.warmup_steps 0"""
LORA = f"{FAST} --model.init_from weights --model.lora.rank 4"
LAST = "runs/a/checkpoints/last.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a text, weights, and a run of adapters on them."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT, "utf-8")
    torch.manual_seed(1)
    GPT(SHAPE).save_pretrained(folder / "weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert gpt(f"{LORA} --run a --checkpoint_every 4") == 0
    return folder


@pytest.fixture(autouse=True)
def _in_a_copy(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def test_only_adapters_are_trained_and_saved():
    adapters = checkpoint("a").weights
    assert len(adapters) == 2 * 6 * SHAPE.num_layers
    assert {tensor.shape[0 if "lora_A" in name else 1] for name, tensor in adapters.items()} == {4}
    base = GPT.from_pretrained("runs/a/base").state_dict()
    torch.testing.assert_close(base, GPT.from_pretrained("weights").state_dict(), atol=0, rtol=0)
    tuned, _ = load("runs/a")
    changed = {name for name, tensor in tuned.state_dict().items() if not torch.equal(tensor, base[name])}
    attention = [f"attention.{name}" for name in ("W_query", "W_key", "W_value", "out_proj")]
    layers = [*attention, "feed_forward.up", "feed_forward.down"]
    assert changed == {f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in layers}


def test_a_resumed_run_equals_one_that_was_not_interrupted():
    shutil.copytree("runs/a", "runs/cut")
    shutil.rmtree("weights")
    for file in ("last.safetensors", "best.safetensors", "step-12.safetensors"):
        Path("runs/cut/checkpoints", file).unlink(missing_ok=True)
    assert gpt("fit --resume runs/cut") == 0
    assert result("cut") == result("a")


def test_the_merged_model_is_the_one_that_was_trained():
    """With peft's layers, and of a snapshot in bfloat16, which has only the adapters too."""
    saved = checkpoint("a")
    model = GPT.from_pretrained("runs/a/base")
    add_adapters(model, 4)
    model.load_state_dict(saved.weights, strict=False)
    tokens = torch.randint(0, 300, (2, 16))
    *_, (step, _, snapshot) = snapshots_of(Path("runs/a"))
    with torch.no_grad():
        merged = load(LAST)[0](tokens)
        torch.testing.assert_close(model.eval()(tokens), merged, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(merged, GPT.from_pretrained("runs/a/base")(tokens), atol=1e-2)
        torch.testing.assert_close(load(snapshot)[0](tokens), merged, atol=5e-2, rtol=5e-2)
    assert (saved.adapters.rank, saved.adapters.scale) == (4, 4.0)
    assert step == 12 and read(snapshot).weights.keys() == saved.weights.keys()


def test_an_export_has_the_merged_weights():
    assert gpt("export --checkpoint runs/a --format hf --output exported") == 0
    torch.testing.assert_close(
        read_weights("exported").weights, read_weights(find("runs/a")).weights, atol=0, rtol=0
    )


@pytest.mark.parametrize(
    "command", ["validate --ckpt_path runs/a", f"{FAST} --model.init_from runs/a --run next"]
)
def test_validation_and_further_training_read_adapters(command):
    assert gpt(command) == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (f"{FAST} --model.lora.rank 4", "model.lora.rank.*init_from"),
        (f"{LORA} --model.lora.rank -1", "rank must be at least 0, got -1"),
    ],
    ids=["no weights to begin with", "negative rank"],
)
def test_options_that_do_not_fit(command, message, refusal):
    assert re.search(message, refusal(f"{command} --run a"))


def test_a_damaged_description_of_the_adapters(refusal):
    part = asdict(checkpoint("a").adapters)
    del part["scale"]
    wrong = rewritten(LAST, "wrong.safetensors", model={"adapters": part})
    for command in ("generate --checkpoint", "validate --ckpt_path"):
        assert "wrong.safetensors" in refusal(f"{command} {wrong}")


def test_a_checkpoint_without_its_base(refusal):
    shutil.copy(LAST, "moved.safetensors")
    error = refusal("generate --checkpoint moved.safetensors")
    assert "holds only adapters, and the weights that they change are missing" in error
    GPT(SHAPE).save_pretrained("runs/a/base")
    for command in ("generate --checkpoint runs/a", "fit --resume runs/a"):
        assert "trained with other weights than those in" in refusal(command)


@pytest.mark.parametrize(
    "shapes",
    [
        {"x.lora_A": (2, 5)},
        {"x.lora_A": (2, 4), "x.lora_B": (3, 2)},
        {"x.lora_A": (2, 5), "x.lora_B": (3, 1)},
        {"bias.lora_A": (2, 5), "bias.lora_B": (3, 2)},
    ],
    ids=["no B", "another width", "another rank", "no matrix"],
)
def test_adapters_that_do_not_fit(shapes):
    base = {"x.weight": torch.zeros(3, 5), "bias.weight": torch.zeros(3)}
    adapters = {f"{name}.default.weight": torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(InputError, match="its adapters"):
        merge(base, adapters, AdapterPart(rank=2, scale=1.0, base=""))
