"""A learned vocabulary travels with the weights: through checkpoints, resumption, fine-tuning and exports."""

import pytest
from tiny_runs import COMMAND, gpt

from gpt.weights.load import load

PROSE = " ".join(f"word{i * i % 1009} и слово" for i in range(1500))
LEARN = "--data.vocabulary learn:300"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A run of two steps, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(PROSE, "utf-8")
    assert gpt(f"{COMMAND} {LEARN} --run own --trainer.max_steps 2") == 0
    capsys.readouterr()
    return tmp_path / "runs" / "own"


def test_a_recipe_that_learns_takes_the_size_from_the_text_and_leaves_weights_their_own(run):
    options = f"{COMMAND} --data.vocabulary learn --model.config.vocab_size 9999"
    assert gpt(f"{options} --run small --trainer.max_steps 2") == 0
    model, tokenizer = load("runs/small")
    assert 300 < model.config.vocab_size == tokenizer.n_vocab < 9999
    tuned = f"{options} --model.init_from runs/own --run tuned --trainer.max_steps 2"
    assert gpt(tuned) == 0
    assert load("runs/tuned")[1] == load("runs/own")[1]


def test_fine_tuning_keeps_it(run, capsys):
    _, tokenizer = load("runs/own")
    with open("chinese.txt", "w", encoding="utf-8") as file:
        file.write("道可道非常道名可名非常名" * 300)
    start = f"{COMMAND} --data.corpus chinese.txt --model.init_from runs/own --trainer.max_steps 1"
    assert gpt(f"{start} --run tuned") == 0
    assert load("runs/tuned")[1] == tokenizer
    assert gpt("fit --resume runs/tuned --trainer.max_steps 2") == 0
    assert load("runs/tuned")[1] == tokenizer
    capsys.readouterr()
    assert gpt(f"{start} {LEARN} --run wrong") == 2
    assert "--data.vocabulary: weights to start from keep their own" in capsys.readouterr().err
