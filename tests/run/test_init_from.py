import pytest
import torch
import yaml
from tiny_runs import rows

from gpt import GPT, GPTConfig
from gpt.cli import main
from gpt.weights.commands import write_export
from gpt.weights.load import StoredModel, load

SHAPE = GPTConfig(vocab_size=300, context_length=24, emb_dim=32, num_heads=2, num_layers=2, qkv_bias=False)
FAST = [
    *("--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--trainer.val_check_interval", "4"),
    *("--model.config.context_length", "16", "--model.config.dropout", "0.0", "--data.batch_size", "4"),
    *("--log_every", "1", "--run", "tuned"),
]
STILL = ["--model.optimizer.lr", "0", "--model.optimizer.weight_decay", "0"]


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """Weights in the book's form, which differs from the defaults in everything a shape can differ in."""
    monkeypatch.chdir(tmp_path)
    model = GPT(SHAPE)
    write_export(StoredModel("gpt", SHAPE, model.state_dict()), tmp_path / "weights", "book")
    return model


def test_a_run_starts_from_the_weights(weights, text_file):
    options = ["--model.init_from", "weights", "--data.corpus", str(text_file), *FAST]
    assert main(["fit", *options, *STILL, "--trainer.max_steps", "2"]) == 0
    model, tokenizer = load("runs/tuned/checkpoints/last.safetensors")
    assert tokenizer.n_vocab == 300
    assert model.config == GPTConfig.from_dict({**SHAPE.to_dict(), "context_length": 16})
    cropped = weights.state_dict()
    cropped["position_embedding.weight"] = cropped["position_embedding.weight"][:16]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, cropped[name]), name
    with open("runs/tuned/config.yaml", encoding="utf-8") as file:
        assert yaml.safe_load(file)["model"]["config"] == model.config.to_dict()


@pytest.mark.parametrize(
    ("length", "line"),
    [
        (16, "of the weights' 24 positions the first 16 are kept: --model.config.context_length 24"),
        (24, None),
        (64, "the weights' table of 24 positions is interpolated to 64"),
    ],
)
def test_a_line_says_what_becomes_of_the_positions(length, line, weights, text_file, capsys):
    options = ["--model.init_from", "weights", "--data.corpus", str(text_file), *FAST]
    options += ["--model.config.context_length", str(length)]
    assert main(["fit", *options, "--trainer.max_steps", "1"]) == 0
    told = [told for told in capsys.readouterr().err.splitlines() if " positions " in told]
    assert len(told) == (line is not None)
    assert line is None or told[0].startswith(f"gpt fit: {line}")
    assert load("runs/tuned")[0].config.context_length == length


def test_weights_with_more_positions_are_resumed_and_exported(weights, text_file, tmp_path):
    """The new positions are read, trained, and stand in other programs' files."""
    options = ["--model.init_from", "weights", "--data.corpus", str(text_file), *FAST]
    options += ["--model.config.context_length", "64"]
    assert main(["fit", *options, "--trainer.max_steps", "2"]) == 0
    (tmp_path / "weights").rename(tmp_path / "moved")
    assert main(["fit", "--resume", "runs/tuned", "--trainer.max_steps", "4"]) == 0
    trained, _ = load("runs/tuned")
    given = StoredModel("gpt", SHAPE, weights.state_dict()).with_positions(64)
    changed = trained.position_embedding.weight != given.weights["position_embedding.weight"]
    assert changed.any(dim=1).all()
    for format in ("hf", "book"):
        assert main(["export", "--checkpoint", "runs/tuned", "--format", format, "--output", format]) == 0
        exported, _ = load(format)
        assert exported.config.context_length == 64
        assert torch.equal(exported.position_embedding.weight, trained.position_embedding.weight)


def test_one_command_starts_a_run_from_weights_and_resumes_it(weights, text_file, capsys):
    command = ["fit", "--model.init_from", "weights", "--resume", "auto_or_new", *FAST]
    command += ["--data.corpus", str(text_file)]
    assert main([*command, "--trainer.max_steps", "1"]) == 0
    assert main([*command, "--trainer.max_steps", "2"]) == 0
    assert "resuming runs/tuned/checkpoints/last.safetensors, after step 1" in capsys.readouterr().err
    assert main([*command, "--model.init_from", "others", "--trainer.max_steps", "3"]) == 2
    assert "the run that is resumed began with weights" in capsys.readouterr().err


def test_a_tuned_run_goes_on_without_the_weights_it_began_with(weights, text_file, tmp_path):
    options = ["--model.init_from", "weights", "--data.corpus", str(text_file), *FAST]
    assert main(["fit", *options, "--trainer.max_steps", "4"]) == 0
    (tmp_path / "weights").rename(tmp_path / "moved")
    assert main(["fit", "--resume", "runs/tuned", "--trainer.max_steps", "6"]) == 0
    assert rows("tuned")[-1]["step"] == "6"
    assert main(["validate", "--ckpt_path", "runs/tuned/checkpoints/last.safetensors"]) == 0
