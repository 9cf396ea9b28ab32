"""On the way from a text to its first gradient, each file is read once."""

import hashlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from known_speed import know_speed

from gpt import GPTConfig
from gpt.run.fit import build
from gpt.run.start import start
from gpt.weights.load import PretrainedGPT

opened: Counter[str] = Counter()
"""How often each file was opened in a test, by the last part of its path."""


def count(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        opened[os.path.basename(os.fspath(arguments[0]))] += 1


@pytest.fixture(scope="module", autouse=True)
def _audited():
    sys.addaudithook(count)  # it stays until the process ends


@pytest.fixture(autouse=True)
def _place(workplace, monkeypatch):
    """A text, and an empty cache, except for the speed of this machine."""
    monkeypatch.setenv("GPT_CACHE", str(workplace / "cache"))
    know_speed(Path("cache"), 3.3e11)
    text = " ".join(f"{number} of {number * number % 977}" for number in range(20_000))
    Path("own.txt").write_text(text, "utf-8")


def built(command: str):
    """What the command starts, its model and its data; only what this opens is counted."""
    opened.clear()
    begun = start("fit", f"{command} --trainer.accelerator cpu --trainer.precision 32-true".split())
    _, module, data = build(begun)
    return begun, module, data


def save_weights(**sizes: int) -> None:
    config = GPTConfig(vocab_size=300, emb_dim=32, num_heads=2, num_layers=1, **sizes)
    PretrainedGPT(config).save_pretrained("weights")


def test_a_planned_run_reads_its_text_once():
    sha256 = hashlib.sha256(Path("own.txt").read_bytes()).hexdigest()
    Path("own.yaml").write_text(f"corpus: {{files: own.txt, sha256: {sha256}}}", "utf-8")
    _, _, data = built("own.yaml --minutes 2")
    assert data.prepared.counts["train"].tokens > 10_000
    assert opened["own.yaml"] == 1
    assert opened["own.txt"] == 3  # to compare its hash, to look at its beginning, and to read it


def test_a_tuning_reads_its_weights_once():
    save_weights(context_length=16)
    begun, module, data = built("own.txt --model.init_from weights --trainer.max_steps 1")
    assert data.prepared.tokenizer.n_vocab == 300
    assert module.config.emb_dim == 32
    assert opened["config.json"] == 1
    assert opened["own.txt"] == 2  # to look at its beginning, and to read it
    assert begun.weights.take() is None  # its memory is free again


def test_a_tuning_on_examples_prepares_them_once():
    """Their lengths decide the positions, before the options are known."""
    save_weights(context_length=512)
    rows = [{"prompt": f"what is {number}?", "completion": f"it is {number}"} for number in range(300)]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    _, _, data = built("own.jsonl --model.init_from weights --trainer.max_steps 1")
    assert data.prepared.counts["train"].documents > 100
    assert opened["own.jsonl"] == 2
    assert opened["meta-4.json"] <= 2  # it was written, and opened
