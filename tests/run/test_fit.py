"""Whole runs of `gpt fit`, tiny ones."""

import json
import math

import numpy as np
import pytest
import torch
import yaml
from tiny_runs import rows, run_in
from torch.nn import functional as F

from gpt import Tokenizer
from gpt.cli import main
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.weights.checkpoint import read
from gpt.weights.load import load


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of one finished run."""
    sizes = ["--data.batch_size", "8", "--trainer.accumulate_grad_batches", "1", "--log_every", "5"]
    steps = ["--trainer.max_steps", "65", "--trainer.val_check_interval", "20", "--checkpoint_every", "10"]
    return run_in(tmp_path_factory.mktemp("fit"), *sizes, *steps)


def test_a_run_leaves_what_the_readme_says(run):
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert {
        "config.yaml",
        "metrics.csv",
        "loss.png",
        "samples.txt",
        "summary.json",
        "checkpoints/best.safetensors",
        "checkpoints/last.safetensors",
    } <= files
    assert not [name for name in files if name.endswith(".tmp")]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "samples.txt").read_text(encoding="utf-8").count("--- step") == 4


def test_the_summary_is_complete_and_true(run):
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert set(summary) == {
        "text",
        "val_bits_per_byte",
        "val_standard_error",
        "val_loss",
        "best_loss",
        "best_step",
        "train_seconds",
        "steps",
        "tokens",
        "tokens_per_second",
        "peak_memory_bytes",
        "parameters",
        "device",
        "precision",
    }
    assert summary["steps"] == 65
    assert summary["tokens"] == 65 * 8 * 16
    assert summary["device"] == "cpu"
    assert summary["parameters"] == load(run)[0].num_parameters()
    assert 0 < summary["val_bits_per_byte"] < 8
    best = read(run / "checkpoints" / "best.safetensors").run
    assert (summary["best_step"], summary["best_loss"]) == (best.step, best.best_loss)
    assert summary["train_seconds"] > 0


def test_held_out_loss_and_bits_per_byte_are_those_of_the_text(run):
    """Against one pass over the validation tokens, window by window, written out here."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    data = config["data"]
    text = str(run.parents[1] / "text.txt")
    prepared = Prepared(prepare(text, vocab_size=300, val_fraction=data["val_fraction"]))
    count = prepared.counts["val"].tokens
    tokens = prepared.stream("val").rows(np.array([0]), count)[0, 1:].astype("int64")
    tokenizer = Tokenizer("gpt2", 300)
    model, _ = load(run / "checkpoints" / "last.safetensors")
    ids = torch.tensor([tokenizer.eot, *tokens.tolist()])
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 16):
            x, y = ids[start : start + 16][: len(ids) - 1 - start], ids[start + 1 : start + 17]
            nats += F.cross_entropy(model(x[None])[0], y, reduction="sum").item()
    text_bytes = len(tokenizer.decode([i for i in tokens.tolist() if i != tokenizer.eot]).encode())
    assert summary["val_loss"] == pytest.approx(nats / len(tokens), rel=1e-4)
    assert summary["val_bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-4)


def test_metrics_have_a_row_an_interval_and_learn_something(run):
    logged = rows(run)
    train = [row for row in logged if row["train_loss"]]
    assert [int(row["step"]) for row in train] == list(range(5, 70, 5))
    assert [int(row["step"]) for row in logged if row["val_loss"]] == [20, 40, 60, 65]
    assert float(train[-1]["train_loss"]) < float(train[0]["train_loss"]) - 1
    assert all(float(row["tokens"]) == int(row["step"]) * 8 * 16 for row in train)
    assert all(0 < float(row["gradient_norm"]) < 100 for row in train)
    rates = [float(row["learning_rate"]) for row in train]
    assert rates[-1] < max(rates)


def test_last_is_the_last_step_and_best_the_best(run):
    assert read(run / "checkpoints" / "last.safetensors").run.step == 65
    losses = {int(row["step"]): float(row["val_loss"]) for row in rows(run) if row["val_loss"]}
    best = read(run / "checkpoints" / "best.safetensors")
    assert best.run.step == min(losses, key=lambda step: losses[step])
    model, _ = load(run)  # a run's model is its best
    assert torch.equal(model.final_norm.weight, best.weights["final_norm.weight"])


def test_a_second_run_of_the_name_overwrites_nothing(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    config = ["--config", str(run / "config.yaml"), "--trainer.max_steps", "2"]
    assert main(["fit", *config]) == 0
    assert (run.parent / "whole-2" / "summary.json").is_file()
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_validate_scores_a_checkpoint(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parents[1])
    assert main(["validate", "--ckpt_path", str(run / "checkpoints" / "last.safetensors")]) == 0
    found = json.loads(capsys.readouterr().out)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert found["val_bits_per_byte"] == pytest.approx(summary["val_bits_per_byte"], rel=1e-5)
