"""Temperature scaling: the best checkpoint of a run is less sure of what it has memorised."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_runs import fit
from torch.nn import functional as F

from gpt import GPT, Tokenizer
from gpt.cli import main
from gpt.data.prepare import prepare_for
from gpt.data.shards import Prepared
from gpt.errors import InputError
from gpt.generation import Sampling, stream_samples
from gpt.run.temperature import divide_logits, find_temperature
from gpt.weights.checkpoint import Checkpoint, _checksum, _sums, read, snapshots_of
from gpt.weights.load import load, read_weights, start_from


@pytest.fixture
def prepared(workplace) -> Prepared:
    return prepare_for(Tokenizer("gpt2", vocab_size=300), "text.txt")


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
    temperature, ratio = find_temperature(model, prepared)
    losses = [F.cross_entropy(logits / 1.05**i, ids[:, 1:].flatten()) for i in range(60)]
    best = int(np.argmin(losses))
    assert temperature == pytest.approx(1.05**best, rel=0.11)  # on other windows
    assert (temperature > 1) == (surer > 1)
    with torch.no_grad():
        assert torch.equal(model(ids[:, :-1]).flatten(0, 1), logits)
        divide_logits(model, temperature)
        torch.testing.assert_close(model(ids[:, :-1]).flatten(0, 1), logits / temperature)
    assert ratio == pytest.approx(float(losses[best] / losses[0]), abs=0.02)


SURE = ["--model.optimizer.lr", "0.05", "--model.optimizer.rest_lr", "0.05", "--run"]


@pytest.fixture
def noise(workplace) -> None:
    """At the end of the text, of which a run is too sure."""
    letters = map(chr, np.random.default_rng(0).integers(97, 123, 3000))
    with open("text.txt", "a", encoding="utf-8") as file:
        file.write("".join(letters))


@pytest.fixture
def scaled(noise, capsys) -> Checkpoint:
    """The best checkpoint of the run `scaled`, which has a temperature."""
    assert fit(*SURE, "scaled", "--temperature_scaling", "true") == 0
    assert "the best checkpoint's logits are divided by " in capsys.readouterr().err
    best = read("runs/scaled/checkpoints/best.safetensors")
    assert best.model.temperature > 1
    return best


def test_a_run_notes_the_temperature_and_leaves_the_weights(scaled, capsys):
    assert fit(*SURE, "plain") == 0
    capsys.readouterr()
    losses = []
    for run in ("plain", "scaled"):
        assert main(["validate", "--ckpt_path", f"runs/{run}/checkpoints/best.safetensors"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["val_loss"])
    assert losses[1] < losses[0]
    summary = json.loads(Path("runs/scaled/summary.json").read_text("utf-8"))
    assert summary["best_loss"] == pytest.approx(losses[1], rel=1e-3)
    for name in ("best", "last"):
        plain, noted = (read(f"runs/{run}/checkpoints/{name}.safetensors") for run in ("plain", "scaled"))
        assert plain.model.temperature == 1
        assert all(torch.equal(tensor, noted.tensors[key]) for key, tensor in plain.tensors.items())
        assert (plain.run.session, plain.run.save) == (noted.run.session, noted.run.save)


def test_the_logits_are_divided_wherever_the_weights_are_used(scaled, tokens, capsys):
    undivided = GPT.from_weights(scaled.config, scaled.weights)(tokens)
    expected = undivided / scaled.model.temperature
    models = {
        "load": load("runs/scaled")[0],
        "from_pretrained": GPT.from_pretrained("runs/scaled"),
        "init_from": start_from(read_weights("runs/scaled"), scaled.config).eval(),
    }
    for format in ("hf", "nanogpt", "book"):
        assert main(["export", "runs/scaled", "--format", format, "--output", format]) == 0
        models[format] = GPT.from_pretrained(format)
    for name, model in models.items():
        tolerance = 2e-3 if name == "nanogpt" else 1e-5  # whose GELU is the exact one
        torch.testing.assert_close(model(tokens), expected, atol=tolerance, rtol=tolerance, msg=name)
    found = read_weights("runs/scaled")
    assert torch.equal(found.weights["final_norm.weight"], models["load"].final_norm.weight)
    # The page's and llama.cpp's files are written from the same weights.
    assert main(["export", "runs/scaled", "--format", "gguf", "--output", "gguf"]) == 0
    (norm,) = (one for one in GGUFReader("gguf/model.gguf").tensors if one.name == "output_norm.weight")
    np.testing.assert_array_equal(norm.data, found.weights["final_norm.weight"].numpy())
    capsys.readouterr()


def test_a_sample_is_the_text_that_the_checkpoint_writes(scaled):
    last = "runs/scaled/checkpoints/last.safetensors"
    assert read(last).model.temperature > 1
    how = {"sampling": Sampling(temperature=0.8, top_k=50), "max_new_tokens": 64, "seed": 0}
    text = "".join(piece for _, piece in stream_samples(*load(last), "", **how)).strip()
    assert Path("runs/scaled/samples.txt").read_text("utf-8").endswith(f"--- step 20\n{text}\n\n")


def test_a_snapshot_of_weights_without_a_validation_has_no_temperature(scaled):
    temperatures = {step: read(file).model.temperature for step, _, file in snapshots_of(Path("runs/scaled"))}
    assert temperatures[1] == temperatures[8] == 1
    assert temperatures[20] == read("runs/scaled/checkpoints/last.safetensors").model.temperature


@pytest.mark.parametrize("backwards", [False, True])
def test_a_finished_run_goes_on_from_the_weights_of_training(backwards, scaled, monkeypatch):
    assert fit(*SURE, "plain") == 0
    listed = Path.glob
    with monkeypatch.context() as patch:
        if backwards:
            patch.setattr(Path, "glob", lambda self, pattern: iter([*listed(self, pattern)][::-1]))
        for run in ("plain", "scaled"):
            assert main(["fit", "--resume", f"runs/{run}", "--trainer.max_steps", "24"]) == 0
    plain, noted = (read(f"runs/{run}/checkpoints/last.safetensors") for run in ("plain", "scaled"))
    assert plain.run.step == noted.run.step == 24
    assert all(torch.equal(tensor, noted.tensors[name]) for name, tensor in plain.tensors.items())


def test_a_file_without_the_number_has_the_temperature_1(scaled, tmp_path):
    """As a run wrote it before: the temperature stood among the run's numbers, not yet applied."""
    with safe_open(scaled.path, "pt") as file:
        texts = file.metadata()
    for temperature, expected in ((None, 1.0), (1.5, 1.5), (0.0, "must be at least 1"), (-2, "at least 1")):
        model = json.loads(texts["model"])
        del model["temperature"]
        if temperature is not None:
            model["temperature"] = temperature
        run = {**json.loads(texts["run"]), "temperature": 1.2}
        parts = {"model": json.dumps(model), "run": json.dumps(run)}
        parts["checksum"] = _checksum(parts, _sums(scaled.tensors))
        save_file(scaled.tensors, tmp_path / "old.safetensors", metadata=parts)
        if isinstance(expected, float):
            assert read(tmp_path / "old.safetensors").model.temperature == expected
        else:
            with pytest.raises(InputError, match=expected):
                read(tmp_path / "old.safetensors")


def test_a_run_that_was_killed_before_its_summary_ends_again(noise, monkeypatch, capsys):
    options = ["--temperature_scaling", "true", *SURE]
    assert fit(*options, "whole") == 0
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr("gpt.run.fit.summarize", lambda training: {}["killed"])
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
        patch.setattr("gpt.run.fit.summarize", lambda training: {}["killed"])
        main(["fit", "--resume", "runs/r", "--trainer.max_steps", "24"])
    assert not Path("runs/r/summary.json").exists()


def test_adapters_have_a_temperature(noise, tokens, capsys):
    pytest.importorskip("peft", reason="peft is not installed")
    assert fit(*SURE, "sure") == 0
    options = ["--model.lora.rank", "2", "--model.init_from", "runs/sure", "--temperature_scaling", "true"]
    assert fit(*options, "--run", "adapted") == 0
    best = read("runs/adapted/checkpoints/best.safetensors")
    assert best.model.temperature > 1
    whole = GPT.from_weights(best.config, {**best.all_weights()})
    summary = json.loads(Path("runs/adapted/summary.json").read_text("utf-8"))
    capsys.readouterr()
    assert main(["validate", "--ckpt_path", str(best.path)]) == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == pytest.approx(summary["best_loss"], rel=1e-3)
    divide_logits(whole, 1 / best.model.temperature)
    loaded, _ = load("runs/adapted")
    expected = whole(tokens) / best.model.temperature
    torch.testing.assert_close(loaded(tokens), expected, atol=1e-5, rtol=1e-5)
