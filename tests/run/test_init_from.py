"""Runs that start from weights: which options the weights decide, and what becomes of their positions."""

from pathlib import Path

import pytest
import torch
import yaml
from tiny_runs import gpt

from gpt import GPT, GPTConfig
from gpt.weights.commands import write_export
from gpt.weights.load import StoredModel, load

SHAPE = GPTConfig(vocab_size=300, context_length=24, emb_dim=32, num_heads=2, num_layers=2, qkv_bias=False)
TUNE = """fit --model.init_from weights --data.corpus text.txt --model.config.context_length 16 --run tuned
--model.config.dropout 0 --data.batch_size 4 --log_every 1 --trainer.val_check_interval 4
--trainer.accelerator cpu --trainer.precision 32-true"""


@pytest.fixture
def weights(workplace):
    """Weights in the book's form, which differ from the defaults in everything a shape can differ in."""
    model = GPT(SHAPE)
    write_export(StoredModel("gpt", SHAPE, model.state_dict()), workplace / "weights", "book")
    return model


def test_a_run_starts_from_the_weights(weights, capsys):
    still = "--model.optimizer.lr 0 --model.optimizer.weight_decay 0 --trainer.max_steps 2"
    assert gpt(f"{TUNE} {still} --model.config.dropout 0.1 --model.config.window_dropout true") == 0
    kept = "of the weights' 24 positions the first 16 are kept: --model.config.context_length 24 keeps all"
    assert f"gpt fit: {kept}\n" in capsys.readouterr().err
    model, tokenizer = load("runs/tuned/checkpoints/last.safetensors")
    assert tokenizer.n_vocab == 300
    chosen = {"context_length": 16, "dropout": 0.1, "window_dropout": True}
    assert model.config == GPTConfig.from_dict({**SHAPE.to_dict(), **chosen})
    cropped = weights.state_dict()
    cropped["position_embedding.weight"] = cropped["position_embedding.weight"][:16]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, cropped[name]), name
    options = yaml.safe_load(Path("runs/tuned/config.yaml").read_text("utf-8"))
    assert options["model"]["config"] == model.config.to_dict()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("model.config.num_layers 3", "--model.config.num_layers 3: the weights have 2, leave it out"),
        ("model.config.emb_dim 50", "--model.config.emb_dim 50: the weights have 32, leave it out"),
        ("model.config.exact_gelu true", "--model.config.exact_gelu True: the weights have False"),
        ("data.vocabulary learn", "--data.vocabulary: weights to start from keep their own, leave it out"),
    ],
)
def test_another_shape_than_that_of_the_weights_is_refused(option, message, weights, refusal):
    assert message in refusal(f"{TUNE} --{option} --trainer.max_steps 1")


def test_weights_with_more_positions_are_resumed_and_exported(weights, capsys):
    """The new positions are read, trained, and stand in other programs' files."""
    assert gpt(f"{TUNE} --model.config.context_length 64 --trainer.max_steps 2") == 0
    told = "gpt fit: the weights' table of 24 positions is interpolated to 64"
    assert told in capsys.readouterr().err
    Path("weights").rename("moved")
    assert gpt("fit --resume runs/tuned --trainer.max_steps 4") == 0
    assert gpt("validate runs/tuned") == 0
    trained, _ = load("runs/tuned")
    given = StoredModel("gpt", SHAPE, weights.state_dict()).with_positions(64)
    changed = trained.position_embedding.weight != given.weights["position_embedding.weight"]
    assert changed.any(dim=1).all()
    for format in ("hf", "book"):
        assert gpt(f"export --checkpoint runs/tuned --format {format} --output {format}") == 0
        exported, _ = load(format)
        assert exported.config.context_length == 64
        assert torch.equal(exported.position_embedding.weight, trained.position_embedding.weight)


def test_one_command_starts_a_run_from_weights_and_resumes_it(weights, capsys):
    command = f"{TUNE} --resume auto_or_new"
    assert gpt(f"{command} --trainer.max_steps 1") == 0
    assert gpt(f"{command} --trainer.max_steps 2") == 0
    assert "resuming runs/tuned/checkpoints/last.safetensors, after step 1" in capsys.readouterr().err
    assert gpt(f"{command} --model.init_from others --trainer.max_steps 3") == 2
    assert "the run that is resumed began with weights" in capsys.readouterr().err
