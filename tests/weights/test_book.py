import json

import pytest
import torch
from other_programs import BOOK_SETTINGS, BookGPT, randomised

from gpt import GPT, GPTConfig
from gpt.errors import InputError
from gpt.weights.commands import write_export
from gpt.weights.formats.book import read_config
from gpt.weights.load import Found, read_weights


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wrapped", [True, False])
def test_logits_of_an_imported_state_dict(qkv_bias, tied, wrapped, tokens, tmp_path):
    book = randomised(BookGPT({**BOOK_SETTINGS, "qkv_bias": qkv_bias}))
    if tied:  # as the book does when it loads GPT-2's weights: equal, not shared
        book.out_head.weight.data = book.tok_emb.weight.data.clone()
    state = (
        {"model_state_dict": book.state_dict(), "optimizer_state_dict": {}} if wrapped else book.state_dict()
    )
    torch.save(state, tmp_path / "model.pth")
    found = read_weights(tmp_path / "model.pth", num_heads=3)
    assert (found.format, found.config.tie_embeddings, found.config.qkv_bias) == ("book", tied, qkv_bias)
    ours = GPT.from_weights(found.config, found.weights)
    torch.testing.assert_close(ours(tokens), book(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False}, {"tie_embeddings": False}])
def test_the_book_loads_an_export_strictly(changes, config, tokens, tmp_path):
    model = randomised(GPT(GPTConfig.from_dict({**config.to_dict(), **changes})))
    write_export(Found("gpt", model.config, model.state_dict()), tmp_path, "book")
    book = BookGPT(json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))).eval()
    book.load_state_dict(torch.load(tmp_path / "model.pth", weights_only=True))
    torch.testing.assert_close(book(tokens), model(tokens), atol=1e-4, rtol=0)
    for path in (tmp_path, tmp_path / "model.pth"):
        read_back = GPT.from_pretrained(path)
        assert read_back.config == model.config
        assert torch.equal(read_back(tokens), model(tokens))


def test_heads_are_known_for_gpt2s_shapes_and_asked_for_otherwise(tmp_path):
    torch.save(BookGPT(BOOK_SETTINGS).state_dict(), tmp_path / "model.pth")
    with pytest.raises(InputError, match=r"2 blocks of width 48 .* give num_heads"):
        GPT.from_pretrained(tmp_path / "model.pth")
    for name, heads in (("gpt2-small", 12), ("gpt2-xl", 25)):
        size = GPTConfig.from_name(name)
        state = {f"trf_blocks.{size.num_layers - 1}.norm1.scale": torch.empty(size.emb_dim)}
        for embedding in ("tok_emb.weight", "pos_emb.weight"):
            state[embedding] = torch.empty(10, size.emb_dim, device="meta")
        assert read_config(state, {}).num_heads == heads


def test_a_wrong_or_missing_tensor_is_named(tmp_path):
    state = BookGPT(BOOK_SETTINGS).state_dict()
    state["trf_blocks.1.ff.layers.0.bias"] = torch.zeros(48)
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(InputError, match=r"layers\.0\.bias has shape \(48,\), expected \(192,\)"):
        read_weights(tmp_path / "model.pth", num_heads=3)
    del state["pos_emb.weight"]
    torch.save(state, tmp_path / "model.pth")
    with pytest.raises(InputError, match=r"lack pos_emb\.weight"):
        read_weights(tmp_path / "model.pth", num_heads=3)
