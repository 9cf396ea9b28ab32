"""A learned vocabulary travels with the weights: through checkpoints, resumption, fine-tuning and exports."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny_runs import COMMAND, gpt

from gpt.cli import main
from gpt.data.module import TokenData
from gpt.text.tokenizer import Tokenizer
from gpt.weights.load import load

PROSE = " ".join(f"word{i * i % 1009} и слово" for i in range(1500))
LEARN = "--data.vocabulary learn:300"


@pytest.fixture
def run(workplace, monkeypatch, capsys):
    """A run of two steps, in the current folder."""
    monkeypatch.setenv("GPT_CACHE", str(workplace / "cache"))
    (workplace / "text.txt").write_text(PROSE, encoding="utf-8")
    assert gpt(f"{COMMAND} {LEARN} --run own --trainer.max_steps 2") == 0
    capsys.readouterr()
    return workplace / "runs" / "own"


def test_a_checkpoint_alone_is_enough(run, tmp_path, monkeypatch, capsys):
    learned = TokenData("text.txt", vocabulary="learn:300").tokenizer
    alone = tmp_path / "elsewhere"
    alone.mkdir()
    (run / "checkpoints" / "last.safetensors").rename(alone / "a.safetensors")
    monkeypatch.setenv("GPT_CACHE", str(alone))
    monkeypatch.chdir(alone)
    model, tokenizer = load("a.safetensors")
    assert tokenizer == learned != Tokenizer("gpt2", 300)
    assert model.config.vocab_size == 300
    command = "generate --checkpoint a.safetensors --max_new_tokens 3 --prompt"
    assert main([*command.split(), "word слово"]) == 0
    assert capsys.readouterr().out.startswith("word слово")
    (alone / "b.txt").write_text(PROSE[:3000], encoding="utf-8")
    assert gpt("evaluate --checkpoint a.safetensors --data b.txt") == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["tokens"] == len(tokenizer.encode(PROSE[:3000])) + 1
    assert scores["bytes"] == len(PROSE[:3000].encode())


def test_a_recipe_that_learns_takes_the_size_from_the_text_and_leaves_weights_their_own(run, refusal):
    recipe = "data: {vocabulary: learn}\nmodel: {config: {vocab_size: 9999}}\n"
    Path("recipe.yaml").write_text(recipe, "utf-8")
    own = re.sub(r"--data.vocabulary null|--model.config.\w+ [.\d]+", "", COMMAND)
    options = f"{own} --config recipe.yaml --model.config.context_length 16"
    small = "--model.config.emb_dim 32 --model.config.num_heads 2 --model.config.num_layers 1"
    assert gpt(f"{options} {small} --run small --trainer.max_steps 2") == 0
    model, tokenizer = load("runs/small")
    assert 300 < model.config.vocab_size == tokenizer.n_vocab < 9999
    tune = "--model.init_from runs/own --trainer.max_steps 1"
    assert gpt(f"{options} {tune} --run tuned") == 0
    assert gpt("fit --resume runs/tuned --trainer.max_steps 2") == 0
    assert load("runs/tuned")[1] == load("runs/own")[1]
    told = "--data.vocabulary: weights to start from keep their own"
    assert told in refusal(f"{options} {tune} {LEARN} --run wrong")


def test_exports_have_the_same_ids(run):
    from transformers import AutoTokenizer

    model, tokenizer = load("runs/own")
    assert gpt("export --checkpoint runs/own --output hf") == 0
    theirs = AutoTokenizer.from_pretrained("hf")
    assert theirs.is_fast
    text = PROSE[:2000] + "\n\n  don't 中文 \U0001f600<|endoftext|>next"
    assert theirs.encode(text) == tokenizer.encode(text, allow_special=True)
    assert theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eot
    assert gpt("import hf --output back") == 0
    for format in ("nanogpt", "book"):
        assert gpt(f"export --checkpoint runs/own --format {format} --output {format}") == 0
    for path in ("hf", "back", "nanogpt", "book/model.pth"):
        exported, same = load(path)
        assert same == tokenizer
        assert torch.equal(exported.token_embedding.weight, model.token_embedding.weight)
