"""On the way from a text to its first gradient, each file is read once."""

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from known_speed import know_speed

from gpt import GPTConfig
from gpt.data.module import TokenData
from gpt.run.fit import build
from gpt.run.start import Start, start
from gpt.training.module import LanguageModel
from gpt.weights.load import PretrainedGPT

_counters: list[Counter[str]] = []


def _count(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _counters and isinstance(arguments[0], str | os.PathLike):
        _counters[-1][os.path.basename(os.fspath(arguments[0]))] += 1


sys.addaudithook(_count)  # Python tells it of each file that it opens


@contextmanager
def counted_opens() -> Iterator[Counter[str]]:
    """Count how often each file is opened in the block, by the last part of its path."""
    _counters.append(Counter())
    try:
        yield _counters[-1]
    finally:
        _counters.pop()


@pytest.fixture
def place(workplace, monkeypatch) -> Path:
    """An empty cache, except for the speed of this machine."""
    monkeypatch.setenv("GPT_CACHE", str(workplace / "cache"))
    know_speed(Path("cache"), 3.3e11)
    text = " ".join(f"{number} of {number * number % 977}" for number in range(20_000))
    Path("own.txt").write_text(text, "utf-8")
    return workplace


def built(command: str) -> tuple[Start, LanguageModel, TokenData]:
    begun = start("fit", f"{command} --trainer.accelerator cpu --trainer.precision 32-true".split())
    _, module, data = build(begun)
    return begun, module, data


def save_weights(**sizes: int) -> None:
    config = GPTConfig(vocab_size=300, emb_dim=32, num_heads=2, num_layers=1, **sizes)
    PretrainedGPT(config).save_pretrained("weights")


def test_a_planned_run_reads_its_text_once(place):
    sha256 = hashlib.sha256(Path("own.txt").read_bytes()).hexdigest()
    Path("own.yaml").write_text(f"corpus: {{files: own.txt, sha256: {sha256}}}", "utf-8")
    with counted_opens() as opened:
        _, _, data = built("own.yaml --minutes 2")
    assert data.prepared.counts["train"].tokens > 10_000
    assert opened["own.yaml"] == 1
    assert opened["own.txt"] == 3  # to compare its hash, to look at its beginning, and to read it


def test_a_tuning_reads_its_weights_once(place):
    save_weights(context_length=16)
    with counted_opens() as opened:
        begun, module, data = built("own.txt --model.init_from weights --trainer.max_steps 1")
        assert data.prepared.tokenizer.n_vocab == 300
    assert module.config.emb_dim == 32
    assert opened["config.json"] == 1
    assert opened["own.txt"] == 2  # to look at its beginning, and to read it
    assert begun.weights.take() is None  # its memory is free again


def test_a_tuning_on_examples_prepares_them_once(place):
    """Their lengths decide the positions, before the options are known."""
    save_weights(context_length=512)
    rows = [{"prompt": f"what is {number}?", "completion": f"it is {number}"} for number in range(300)]
    Path("own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with counted_opens() as opened:
        _, _, data = built("own.jsonl --model.init_from weights --trainer.max_steps 1")
        assert data.prepared.counts["train"].documents > 100
    assert opened["own.jsonl"] == 2
    assert opened["meta-4.json"] <= 2  # it was written, and opened
