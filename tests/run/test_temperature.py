"""Temperature scaling: the best checkpoint of a run says less surely what it has learned by heart."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import fit
from torch.nn import functional as F

from gpt import GPT, Tokenizer
from gpt.cli import main
from gpt.data.prepare import prepare_for
from gpt.data.shards import Prepared
from gpt.run.temperature import scale_temperature
from gpt.weights.checkpoint import read


@pytest.fixture
def prepared(workplace) -> Prepared:
    return Prepared(prepare_for(Tokenizer("gpt2", vocab_size=300), "text.txt"))


@pytest.mark.parametrize("surer", [1.0, 20.0])
def test_the_temperature_is_the_one_at_which_held_out_text_is_likeliest(surer, config, prepared):
    model = GPT(config).eval()
    stream = prepared.stream("val").rows(np.arange(40) * config.context_length, config.context_length)
    ids = torch.from_numpy(stream.astype(np.int64))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(3):
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter in model.final_norm.parameters():
            parameter *= surer
        logits = model(ids[:, :-1]).flatten(0, 1)
    temperature, ratio = scale_temperature(model, prepared)
    losses = [F.cross_entropy(logits / 1.05**i, ids[:, 1:].flatten()) for i in range(60)]
    best = int(np.argmin(losses))
    assert temperature == pytest.approx(1.05**best, rel=0.11)  # on other windows
    assert (temperature > 1) == (surer > 1)
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :-1]).flatten(0, 1), logits / temperature)
    assert ratio == pytest.approx(float(losses[best] / losses[0]), abs=0.02)


SURE = ["--model.optimizer.lr", "0.05", "--model.optimizer.rest_lr", "0.05", "--run"]


@pytest.fixture
def noise(workplace) -> None:
    """At the end of the text, of which a run is too sure."""
    letters = map(chr, np.random.default_rng(0).integers(97, 123, 3000))
    with open("text.txt", "a", encoding="utf-8") as file:
        file.write("".join(letters))


def test_a_run_scales_its_best_checkpoint_and_keeps_the_last(noise, capsys):
    assert fit(*SURE, "plain") == 0
    assert fit(*SURE, "scaled", "--temperature_scaling", "true") == 0
    assert "the best checkpoint's logits are divided by " in capsys.readouterr().err
    plain, scaled = (
        {name: read(f"runs/{run}/checkpoints/{name}.safetensors") for name in ("best", "last")}
        for run in ("plain", "scaled")
    )
    for name, tensor in plain["last"].tensors.items():
        assert torch.equal(tensor, scaled["last"].tensors[name])
    before, after = plain["best"], scaled["best"]
    changed = {name for name in before.tensors if not torch.equal(before.tensors[name], after.tensors[name])}
    assert changed == {"final_norm.weight", "final_norm.bias"}
    assert after.run.step == before.run.step
    losses = []
    for run in ("plain", "scaled"):
        assert main(["validate", "--ckpt_path", f"runs/{run}/checkpoints/best.safetensors"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["val_loss"])
    assert losses[1] < losses[0]
    summary = json.loads(Path("runs/scaled/summary.json").read_text("utf-8"))
    assert summary["best_loss"] == pytest.approx(losses[1], rel=1e-3)


def test_a_run_that_was_killed_before_its_summary_ends_again(noise, monkeypatch, capsys):
    options = ["--temperature_scaling", "true", *SURE]
    assert fit(*options, "whole") == 0
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr("gpt.run.fit.summarize", lambda loop: {}["killed"])
        fit(*options, "killed")
    killed, whole = Path("runs/killed"), Path("runs/whole")
    assert not (killed / "summary.json").exists()
    assert main(["fit", "--resume", "runs/killed"]) == 0
    told, wanted = (json.loads((run / "summary.json").read_text("utf-8")) for run in (killed, whole))
    timed = ("train_seconds", "tokens_per_second", "peak_memory_bytes")
    assert {**told, **dict.fromkeys(timed)} == {**wanted, **dict.fromkeys(timed)}
    for name in ("best", "last"):
        tensors = [read(run / f"checkpoints/{name}.safetensors").tensors for run in (killed, whole)]
        assert all(torch.equal(tensor, tensors[1][key]) for key, tensor in tensors[0].items())
    capsys.readouterr()
    assert main(["fit", "--resume", "runs/killed"]) == 0
    assert "all 20 steps are done" in capsys.readouterr().err
    # Scaled once more, it keeps the loss that it has.
    (killed / "summary.json").unlink()
    assert main(["fit", "--resume", "runs/killed"]) == 0
    again = json.loads((killed / "summary.json").read_text("utf-8"))
    assert again["best_loss"] == pytest.approx(wanted["best_loss"], rel=1e-6)


def test_a_run_that_is_continued_has_no_summary_until_it_ends(workplace, monkeypatch):
    assert fit("--run", "r") == 0
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr("gpt.run.fit.summarize", lambda loop: {}["killed"])
        main(["fit", "--resume", "runs/r", "--trainer.max_steps", "24"])
    assert not Path("runs/r/summary.json").exists()


def test_adapters_have_no_temperature(workplace, mine, capsys):
    options = ["--temperature_scaling", "true", "--model.lora.rank", "2", "--model.init_from", str(mine)]
    assert main(["fit", *options]) == 2
    assert "temperature_scaling changes the last norm" in capsys.readouterr().err
