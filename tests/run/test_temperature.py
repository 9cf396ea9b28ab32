"""Temperature scaling: the best checkpoint of a run is less sure of what it has memorised."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from rewritten import retold
from tiny_runs import TEXT, checkpoint, fit, gpt, summary
from torch.nn import functional as F

from gpt import GPT, Tokenizer
from gpt.data.prepare import prepare_named
from gpt.errors import InputError
from gpt.generation import Sampling, stream_samples
from gpt.run.temperature import divide_logits, find_temperature
from gpt.weights.checkpoint import Checkpoint, read
from gpt.weights.load import load, read_weights, start_from
from gpt.weights.runs import snapshots_of

SURE = "--model.optimizer.lr 0.05 --model.optimizer.rest_lr 0.05"
SCALED = f"{SURE} --temperature_scaling true"
BEST = Path("runs/scaled/checkpoints/best.safetensors")


@pytest.mark.parametrize("surer", [1.0, 20.0])
@torch.no_grad()
def test_the_temperature_is_the_one_at_which_held_out_text_is_likeliest(surer, config, workplace):
    prepared = prepare_named("text.txt", Tokenizer("gpt2", vocab_size=300))
    stream = prepared.stream("val").rows(np.arange(40) * config.context_length, config.context_length)
    ids = torch.from_numpy(stream.astype(np.int64))
    inputs, targets = ids[:, :-1], ids[:, 1:].flatten()
    model = GPT(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(3):
        with torch.enable_grad():
            F.cross_entropy(model(inputs).flatten(0, 1), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    divide_logits(model, 1 / surer)
    logits = model(inputs).flatten(0, 1)
    losses = [F.cross_entropy(logits / 1.05**power, targets).item() for power in range(60)]
    best = int(np.argmin(losses))

    temperature, ratio = find_temperature(model, prepared)

    assert temperature == pytest.approx(1.05**best, rel=0.11)  # on other windows
    assert (temperature > 1) == (surer > 1)
    assert ratio == pytest.approx(losses[best] / losses[0], abs=0.02)
    divide_logits(model, temperature)
    torch.testing.assert_close(model(inputs).flatten(0, 1), logits / temperature)


@torch.no_grad()
def test_a_model_that_is_worse_than_guessing_has_a_finite_temperature(config, workplace):
    """Its loss falls with each higher temperature."""
    prepared = prepare_named("text.txt", Tokenizer("gpt2", vocab_size=300))
    model = GPT(config).eval()
    divide_logits(model, 1e-6)
    temperature, ratio = find_temperature(model, prepared)
    assert 60 < temperature <= 64 and 0 < ratio < 1


@torch.no_grad()
def test_a_model_that_is_certain_and_right_keeps_its_logits(config, workplace, monkeypatch):
    monkeypatch.setattr("gpt.run.temperature.head_cross_entropy", lambda *_: torch.tensor(0.0))
    prepared = prepare_named("text.txt", Tokenizer("gpt2", vocab_size=300))
    assert find_temperature(GPT(config).eval(), prepared) == (1.0, 1.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a text that ends in noise, of which a run is too sure, and two runs on it."""
    folder = tmp_path_factory.mktemp("trained")
    letters = map(chr, np.random.default_rng(0).integers(97, 123, 3000))
    (folder / "text.txt").write_text(TEXT + "".join(letters), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert fit(SURE, "--run plain") == 0
        assert fit(SCALED, "--run scaled") == 0
    return folder


@pytest.fixture
def runs(trained, workplace) -> None:
    """Copies of the runs `plain` and `scaled`, and of their text."""
    shutil.copytree(trained, workplace, dirs_exist_ok=True)


@pytest.fixture
def scaled(runs) -> Checkpoint:
    """The best checkpoint of the run `scaled`, which has a temperature."""
    best = read(BEST)
    assert best.model.temperature > 1
    return best


def validation_loss(path: Path | str, capsys) -> float:
    capsys.readouterr()
    assert gpt(f"validate --ckpt_path {path}") == 0
    return json.loads(capsys.readouterr().out)["val_loss"]


def assert_same_weights(one: Checkpoint, other: Checkpoint) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def test_a_run_notes_the_temperature_and_leaves_the_weights(scaled, capsys):
    plain_loss = validation_loss("runs/plain/checkpoints/best.safetensors", capsys)
    scaled_loss = validation_loss(BEST, capsys)
    assert scaled_loss < plain_loss
    assert summary("scaled")["best_loss"] == pytest.approx(scaled_loss, rel=1e-3)
    for name in ("best", "last"):
        plain, noted = checkpoint("plain", name), checkpoint("scaled", name)
        assert plain.model.temperature == 1
        assert (plain.run.session, plain.run.save) == (noted.run.session, noted.run.save)
        assert_same_weights(plain, noted)


def test_the_logits_are_divided_wherever_the_weights_are_used(scaled, tokens):
    expected = GPT.from_weights(scaled.config, scaled.weights)(tokens) / scaled.model.temperature
    stored = read_weights("runs/scaled")
    models = {"load": load("runs/scaled")[0], "init_from": start_from(stored, scaled.config).eval()}
    models["from_pretrained"] = GPT.from_pretrained("runs/scaled")
    for format in ("hf", "nanogpt", "book"):
        assert gpt(f"export runs/scaled --format {format} --output {format}") == 0
        models[format] = GPT.from_pretrained(format)
    for name, model in models.items():
        tolerance = 2e-3 if name == "nanogpt" else 1e-5  # whose GELU is the exact one
        torch.testing.assert_close(model(tokens), expected, atol=tolerance, rtol=tolerance, msg=name)
    # The page's and llama.cpp's files are written from the same weights.
    assert gpt("export runs/scaled --format gguf --output gguf") == 0
    (norm,) = (part for part in GGUFReader("gguf/model.gguf").tensors if part.name == "output_norm.weight")
    np.testing.assert_array_equal(norm.data, stored.weights["final_norm.weight"].numpy())


def test_samples_and_snapshots_have_the_temperature_of_their_validation(runs):
    last = checkpoint("scaled")
    assert last.model.temperature > 1
    how = {"sampling": Sampling(temperature=0.8, top_k=50), "max_new_tokens": 64, "seed": 0}
    text = "".join(piece for _, piece in stream_samples(*load(last.path), "", **how)).strip()
    assert Path("runs/scaled/samples.txt").read_text("utf-8").endswith(f"--- step 20\n{text}\n\n")
    temperatures = {step: read(file).model.temperature for step, _, file in snapshots_of(Path("runs/scaled"))}
    assert temperatures[1] == temperatures[8] == 1  # without a validation
    assert temperatures[20] == last.model.temperature


def test_a_finished_run_goes_on_from_the_weights_of_training(runs, monkeypatch):
    """Also where the system lists its checkpoints in another order than in the other tests."""
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: reversed([*glob(self, pattern)]))
    for run in ("plain", "scaled"):
        assert gpt(f"fit --resume runs/{run} --trainer.max_steps 24") == 0
    assert checkpoint("plain").run.step == checkpoint("scaled").run.step == 24
    assert_same_weights(checkpoint("plain"), checkpoint("scaled"))


def test_a_file_has_a_temperature_of_at_least_1_or_none(scaled):
    """Runs of earlier versions wrote none."""
    number = f'"temperature":{scaled.model.temperature}'
    with pytest.raises(InputError, match="must be at least 1"):
        read(retold(BEST, "colder.safetensors", number, '"temperature":0.5'))
    older = retold(BEST, "older.safetensors", number, '"another_number":1.2')
    assert read(older).model.temperature == 1


def test_a_run_that_was_killed_before_its_summary_ends_again(runs, monkeypatch):
    """Scaled once more, it keeps the loss that it has."""

    def kill_before_summary(command: str) -> None:
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr("gpt.run.fit.summarize", lambda training: {}["killed"])
            fit(command)
        assert not Path("runs/killed/summary.json").exists()

    kill_before_summary(f"{SCALED} --run killed")
    assert gpt("fit --resume runs/killed") == 0
    measured = dict.fromkeys(("train_seconds", "tokens_per_second", "peak_memory_bytes"))
    assert summary("killed") | measured == summary("scaled") | measured
    for name in ("best", "last"):
        assert_same_weights(checkpoint("killed", name), checkpoint("scaled", name))
    Path("runs/killed/summary.json").unlink()
    assert gpt("fit --resume runs/killed") == 0
    assert summary("killed")["best_loss"] == pytest.approx(summary("scaled")["best_loss"], rel=1e-6)
    kill_before_summary("--resume runs/killed --trainer.max_steps 21")


def test_adapters_have_a_temperature(runs, tokens, capsys):
    pytest.importorskip("peft", reason="peft is not installed")
    lora = "--model.lora.rank 2 --model.init_from runs/plain --temperature_scaling true"
    assert fit(lora, "--run adapted") == 0
    assert "the best checkpoint's logits are divided by " in capsys.readouterr().err
    best = checkpoint("adapted", "best")
    assert best.model.temperature > 1
    loss = validation_loss(best.path, capsys)
    assert loss == pytest.approx(summary("adapted")["best_loss"], rel=1e-3)
    whole = GPT.from_weights(best.config, best.all_weights())
    torch.testing.assert_close(load("runs/adapted")[0](tokens), whole(tokens), atol=1e-5, rtol=1e-5)
