"""Whole runs of `gpt fit`, tiny ones."""

import math

import numpy as np
import pytest
import torch
import yaml
from tiny_runs import checkpoint, contents, gpt, rows, run_in, summary
from torch.nn import functional as F

from gpt import Tokenizer
from gpt.data.prepare import prepare
from gpt.data.prepared import Prepared
from gpt.weights.load import load


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of one finished run."""
    sizes = "--data.batch_size 8 --trainer.accumulate_grad_batches 1 --log_every 5"
    steps = "--trainer.max_steps 65 --trainer.val_check_interval 20 --checkpoint_every 10"
    return run_in(tmp_path_factory.mktemp("fit"), f"{sizes} {steps}")


FILES = """config.yaml metrics.csv loss.png samples.txt summary.json checkpoints/best.safetensors
checkpoints/last.safetensors"""
FIGURES = """text val_bits_per_byte val_standard_error val_loss best_loss best_step train_seconds steps tokens
tokens_per_second peak_memory_bytes parameters device precision"""


def test_a_run_leaves_what_the_readme_says(run):
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert files >= set(FILES.split())
    assert not [name for name in files if name.endswith(".tmp")]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "samples.txt").read_text("utf-8").count("--- step") == 4


def test_the_summary_and_the_checkpoints_are_complete_and_true(run):
    figures = summary(run)
    assert set(figures) == set(FIGURES.split())
    assert (figures["steps"], figures["tokens"], figures["device"]) == (65, 65 * 8 * 16, "cpu")
    assert figures["train_seconds"] > 0
    assert checkpoint(run).run.step == 65
    losses = {int(row["step"]): float(row["val_loss"]) for row in rows(run) if row["val_loss"]}
    best = checkpoint(run, "best")
    assert best.run.step == min(losses, key=losses.get)
    assert (figures["best_step"], figures["best_loss"]) == (best.run.step, best.run.best_loss)
    model, _ = load(run)  # a run's model is its best
    assert figures["parameters"] == model.num_parameters()
    assert torch.equal(model.final_norm.weight, best.weights["final_norm.weight"])


def test_held_out_loss_and_bits_per_byte_are_those_of_the_text(run):
    """Against one pass over the validation tokens, window by window, written out here."""
    fraction = yaml.safe_load((run / "config.yaml").read_text("utf-8"))["data"]["val_fraction"]
    prepared = Prepared(prepare(str(run.parents[1] / "text.txt"), vocab_size=300, val_fraction=fraction))
    count = prepared.counts["val"].tokens
    tokens = prepared.stream("val").rows(np.array([0]), count)[0, 1:].tolist()
    tokenizer = Tokenizer("gpt2", 300)
    model, _ = load(run / "checkpoints" / "last.safetensors")
    ids = torch.tensor([tokenizer.eot, *tokens])
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens), 16):
            inputs, targets = ids[start : start + 16], ids[start + 1 : start + 17]
            logits = model(inputs[None, : len(targets)])[0]
            nats += F.cross_entropy(logits, targets, reduction="sum").item()
    text_bytes = len(tokenizer.decode([i for i in tokens if i != tokenizer.eot]).encode())
    assert summary(run)["val_loss"] == pytest.approx(nats / len(tokens), rel=1e-4)
    assert summary(run)["val_bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-4)


def test_a_second_run_of_the_name_overwrites_nothing(run, monkeypatch):
    monkeypatch.chdir(run.parents[1])
    before = contents(run)
    assert gpt(f"fit --config {run / 'config.yaml'} --trainer.max_steps 2") == 0
    assert (run.parent / "whole-2" / "summary.json").is_file()
    assert contents(run) == before
