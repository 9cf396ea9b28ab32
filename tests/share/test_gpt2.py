"""Nothing is exported that other programs would compute otherwise, at any width and without a compiler."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gpt import GPTConfig
from gpt.generation.samples import NOT_FINITE
from gpt.model import GPT, FeedForward, TransformerBlock
from gpt.share.gpt2 import is_gpt2, logits
from tests.generation.conftest import sharp

pytestmark = pytest.mark.usefixtures("workplace")
ODD = GPTConfig(vocab_size=257, context_length=20, emb_dim=42, num_heads=3, num_layers=2)
CONFIGS = {
    "odd widths": ODD,
    "no biases": replace(ODD, qkv_bias=False),
    "an untied head": replace(ODD, tie_embeddings=False),
    "the exact GELU": replace(ODD, exact_gelu=True),
    "one position": replace(ODD, context_length=1),
}
FILES = {"hf": "hf", "nanogpt": "nanogpt", "book": "book", "gguf": "gguf", "html": "it.html"}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_model_computes_gpt2(config):
    model = sharp(config)
    tokens = torch.randint(0, 257, (2, config.context_length))
    with torch.no_grad():
        torch.testing.assert_close(logits(config, model.state_dict(), tokens), model(tokens))
    assert is_gpt2(model)
    model.final_norm.eps = 0.1
    assert not is_gpt2(model)


def scaled_residual(block, x, **options):
    x = x + block.attention(block.attention_norm(x), **options)
    return x + 0.9 * block.feed_forward(block.feed_forward_norm(x))


def after_init(edited, add):
    """An `__init__` of a class that does more: what `add` does with the module and its width."""
    init = edited.__init__

    def more(self, config, *others):
        init(self, config, *others)
        add(self, config.emb_dim)

    return "__init__", more


def add_gate(block, width):
    block.gate = nn.Parameter(torch.zeros(width))  # which nothing reads: logits stay GPT-2's


def narrow(feed_forward, width):
    feed_forward.up, feed_forward.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)


def drop_bias(model, width):
    model.final_norm = nn.LayerNorm(width, bias=False)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_damaged_weights_are_said_to_be_damaged_in_every_format(value, refusal):
    model = sharp(ODD)
    with torch.no_grad():
        model.blocks[1].feed_forward.up.weight[0, 0] = value
    model.save_pretrained("mine")
    for format_, output in FILES.items():
        assert NOT_FINITE in refusal(f"export mine --format {format_} --output {output}")
        assert not Path(output).exists()


OTHER_NUMBERS = "not what the edited gpt/ does"


@pytest.mark.parametrize(
    ("edited", "change", "message"),
    [
        (TransformerBlock, ("forward", scaled_residual), OTHER_NUMBERS),
        (TransformerBlock, after_init(TransformerBlock, add_gate), r"has a tensor blocks\.0\.gate of shape"),
        (FeedForward, after_init(FeedForward, narrow), OTHER_NUMBERS),
        (GPT, after_init(GPT, drop_bias), r"has no tensor final_norm\.bias"),
    ],
    ids=["arithmetic", "an unread tensor", "another width", "a tensor less"],
)
def test_an_edited_model_is_refused_in_every_format(edited, change, message, tmp_path, monkeypatch, refusal):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("GPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(edited, *change)
    sharp(ODD).save_pretrained("mine")
    for format_, output in FILES.items():
        assert re.search(message, refusal(f"export mine --format {format_} --output {output}"))
        assert not Path(output).exists()
