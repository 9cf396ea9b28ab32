import pytest
import torch
from other_programs import book_state, huggingface_model

from gpt import GPT, GPTConfig
from gpt.errors import InputError
from gpt.weights.commands import write_export
from gpt.weights.load import StoredModel, read_weights


@pytest.mark.parametrize(("qkv_bias", "tied"), [(True, True), (False, False)])
def test_a_state_dict_in_and_out(qkv_bias, tied, tokens, tmp_path):
    """The book saves it by itself or beside the optimizer's, and names the heads in its configuration."""
    theirs = huggingface_model(qkv_bias=qkv_bias, tie_word_embeddings=tied)
    state = book_state(theirs, qkv_bias=qkv_bias)
    (tmp_path / "config.json").write_text('{"n_heads": 3}', "utf-8")
    for saved in (state, {"model_state_dict": state, "optimizer_state_dict": {}}):
        torch.save(saved, tmp_path / "model.pth")
        stored = read_weights(tmp_path / "model.pth")
        assert stored.format == "book"
        assert (stored.config.tie_embeddings, stored.config.qkv_bias) == (tied, qkv_bias)
        ours = GPT.from_weights(stored.config, stored.weights)
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    write_export(stored, tmp_path / "out", "book")
    exported = torch.load(tmp_path / "out" / "model.pth", weights_only=True)
    torch.testing.assert_close(exported, state, rtol=0, atol=0)
    for path in (tmp_path / "out", tmp_path / "out" / "model.pth"):
        assert read_weights(path).config == stored.config


def test_masks_that_are_larger_than_the_weights(tmp_path):
    """All blocks share one in the file, and each has its name for it."""
    config = GPTConfig(vocab_size=300, context_length=512, emb_dim=16, num_heads=2, num_layers=8)
    model = GPT(config)
    write_export(StoredModel("gpt", config, model.state_dict()), tmp_path, "book")
    assert read_weights(tmp_path).config == config


def test_heads_are_known_for_gpt2s_widths_and_asked_for_otherwise(tmp_path):
    torch.save(book_state(huggingface_model()), tmp_path / "model.pth")
    with pytest.raises(InputError, match=r"of width 48 .* write {\"n_heads\": NUMBER} into config\.json"):
        GPT.from_pretrained(tmp_path / "model.pth")
    xl = {name: torch.empty(10, 1600) for name in ("tok_emb.weight", "pos_emb.weight")}
    xl |= {"final_norm.scale": torch.ones(1600), "final_norm.shift": torch.zeros(1600)}
    torch.save({**xl, "out_head.weight": xl["tok_emb.weight"]}, tmp_path / "model.pth")
    with pytest.raises(InputError, match="num_layers must be at least 1, got 0"):
        GPT.from_pretrained(tmp_path / "model.pth")
