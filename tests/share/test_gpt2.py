"""Nothing is exported that other programs would compute otherwise, at any width and without a compiler."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gpt import GPT, GPTConfig, model
from gpt.cli import main
from gpt.share.gpt2 import is_gpt2, logits
from tests.generation.conftest import sharp

ODD = GPTConfig(vocab_size=257, context_length=20, emb_dim=42, num_heads=3, num_layers=2)
CONFIGS = {
    "odd widths": ODD,
    "biases": replace(ODD, qkv_bias=True),
    "an untied head": replace(ODD, tie_embeddings=False),
    "the exact GELU": replace(ODD, exact_gelu=True),
    "one position": replace(ODD, context_length=1),
}
FORMATS = ("hf", "nanogpt", "book", "gguf", "html")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_computes_gpt2(name):
    config = CONFIGS[name]
    written = sharp(config)
    tokens = torch.randint(0, 257, (2, config.context_length))
    with torch.no_grad():
        torch.testing.assert_close(logits(config, written.state_dict(), tokens), written(tokens))
    assert is_gpt2(written)
    written.final_norm.eps = 0.1
    assert not is_gpt2(written)


def scaled_residual(block, x, **options):
    x = x + block.attention(block.attention_norm(x), **options)
    return x + 0.9 * block.feed_forward(block.feed_forward_norm(x))


def gated(build):
    def build_more(self, config, *rest):
        build(self, config, *rest)
        self.gate = nn.Parameter(torch.zeros(config.emb_dim))  # which nothing reads: logits stay GPT-2's

    return build_more


def narrow(build):
    def build_narrower(self, config):
        build(self, config)
        self.up = nn.Linear(config.emb_dim, 3 * config.emb_dim)
        self.down = nn.Linear(3 * config.emb_dim, config.emb_dim)

    return build_narrower


def without_bias(build):
    def build_less(self, config):
        build(self, config)
        self.final_norm = nn.LayerNorm(config.emb_dim, bias=False)

    return build_less


EDITS = {
    "arithmetic": (model.TransformerBlock, "forward", scaled_residual, "not what the edited gpt/ does"),
    "an unread tensor": (model.TransformerBlock, "__init__", gated, r"has a tensor blocks\.0\.gate of shape"),
    "another width": (model.FeedForward, "__init__", narrow, "not what the edited gpt/ does"),
    "a tensor less": (model.GPT, "__init__", without_bias, r"has no tensor final_norm\.bias"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_is_refused_in_every_format(edit, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("GPT_CACHE", str(tmp_path / "cache"))
    place, name, change, message = EDITS[edit]
    monkeypatch.setattr(place, name, change(getattr(place, name)) if name == "__init__" else change)
    torch.manual_seed(0)
    GPT(ODD).save_pretrained("mine")
    for format in FORMATS:
        output = Path(f"{format}.html" if format == "html" else format)
        assert main(["export", "mine", "--format", format, "--output", str(output)]) == 2
        told = capsys.readouterr().err
        assert re.search(message, told), told
        assert not output.exists()


def test_an_unedited_model_of_odd_widths_is_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    GPT(ODD).save_pretrained("mine")
    for format in FORMATS:
        output = f"{format}.html" if format == "html" else format
        assert main(["export", "mine", "--format", format, "--output", output]) == 0
