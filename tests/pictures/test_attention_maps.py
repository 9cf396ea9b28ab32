"""`gpt attention`: the weights that it reads from a model, and its pictures."""

import numpy as np
import pytest
import torch

import gpt.pictures.attention
from gpt import GPT
from gpt.config import GPTConfig
from gpt.errors import InputError
from gpt.pictures.attention import attention_maps, attention_weights, heat_map, overview
from gpt.text.tokenizer import Tokenizer

TEXT = "Each token costs $5, and $6 later."


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> tuple[GPT, Tokenizer]:
    """Stands in for the checkpoint: a tiny GPT with random weights."""
    config = GPTConfig(vocab_size=300, context_length=40, emb_dim=12, num_heads=3, num_layers=2)
    pair = GPT(config).eval(), Tokenizer("gpt2", vocab_size=300)
    monkeypatch.setattr(gpt.pictures.attention, "load", lambda *_: pair)
    return pair


@torch.no_grad()
def test_the_weights_are_those_of_each_layer_with_a_label_for_each_token(loaded):
    model, tokenizer = loaded
    weights, labels = attention_weights(*loaded, TEXT)
    ids = torch.tensor([tokenizer.encode(TEXT)])
    x = model.token_embedding(ids) + model.position_embedding.weight[: len(labels)]
    for block, of_layer in zip(model.blocks, torch.from_numpy(weights), strict=True):
        _, expected = block.attention(block.attention_norm(x), need_weights=True)
        torch.testing.assert_close(of_layer, expected[0])
        x = block(x)
    assert len(labels) == ids.shape[1]
    assert "".join(labels) == TEXT.replace(" ", "·")


def test_cells_are_drawn_from_the_weights():
    """Only cells that are later and zero are masked: a mask that leaks stays visible."""
    leaking = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    drawn = heat_map(leaking, list("abc"), "leaks").axes[0].images[0].get_array()
    assert drawn.mask.tolist() == [[False, False, True], [False, False, True], [False, False, False]]
    assert np.array_equal(drawn.data, leaking)


@pytest.mark.parametrize(("length", "shown"), [(12, True), (13, False)])
def test_the_overview_names_few_tokens_at_its_edges(length, shown):
    labels = [f"t{n}" for n in range(length)]
    maps = np.broadcast_to(np.eye(length, dtype=np.float32), (2, 3, length, length))
    figure = overview(maps, labels, "two layers")
    left, bottom = figure.axes[0], figure.axes[5]
    expected = labels if shown else []
    assert [text.get_text() for text in left.get_yticklabels()] == expected
    assert [text.get_text() for text in bottom.get_xticklabels()] == expected
    assert not left.xaxis.get_tick_params()["labelbottom"]


def test_the_command_writes_a_map_for_each_head(loaded, tmp_path):
    attention_maps("run", TEXT, tmp_path / "maps")
    names = [f"layer-0{i}-head-0{j}.png" for i in range(2) for j in range(3)]
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == [*names, "overview.png"]


@pytest.mark.parametrize(
    ("text", "message"), [("", "no text"), ("word " * 41, "more than the context_length 40")]
)
def test_bad_input_writes_nothing(text, message, loaded, tmp_path):
    with pytest.raises(InputError, match=message):
        attention_maps(text=text, output=tmp_path / "maps")
    assert not (tmp_path / "maps").exists()


def test_a_title_has_code_points_for_characters_that_the_font_lacks(loaded, tmp_path, monkeypatch):
    """matplotlib's warning of a missing glyph fails the test."""
    titles = []
    draw = gpt.pictures.attention.overview
    monkeypatch.setattr(gpt.pictures.attention, "overview", lambda *it: titles.append(it[2]) or draw(*it))
    attention_maps("run", "to\n世 \N{FOX FACE}", tmp_path / "maps")
    attention_maps("run", "世界世界世界", tmp_path / "more")
    assert titles == ['Attention in "to U+4E16 U+1F98A"', 'Attention in "U+4E16U+754CU+4E16U+754CU+4E1…"']
