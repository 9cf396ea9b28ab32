import pytest
import torch
from other_programs import book_state, huggingface_model

from gpt import GPT, GPTConfig
from gpt.errors import InputError
from gpt.weights.commands import write_export
from gpt.weights.formats.book import read_config
from gpt.weights.load import read_weights


@pytest.mark.parametrize(("qkv_bias", "tied"), [(True, True), (False, False)])
def test_a_state_dict_in_and_out(qkv_bias, tied, tokens, tmp_path):
    """The book saves it alone or beside the optimizer's, and names the heads in its configuration."""
    theirs = huggingface_model(qkv_bias=qkv_bias, tie_word_embeddings=tied)
    state = book_state(theirs, qkv_bias=qkv_bias)
    (tmp_path / "config.json").write_text('{"n_heads": 3}', encoding="utf-8")
    for saved in (state, {"model_state_dict": state, "optimizer_state_dict": {}}):
        torch.save(saved, tmp_path / "model.pth")
        found = read_weights(tmp_path / "model.pth")
        assert (found.format, found.config.tie_embeddings, found.config.qkv_bias) == ("book", tied, qkv_bias)
        ours = GPT.from_weights(found.config, found.weights)
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    write_export(found, tmp_path / "out", "book")
    exported = torch.load(tmp_path / "out" / "model.pth", weights_only=True)
    assert exported.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(exported[name], tensor), name
    for path in (tmp_path / "out", tmp_path / "out" / "model.pth"):
        assert read_weights(path).config == found.config


def test_heads_are_known_for_gpt2s_shapes_and_asked_for_otherwise(tmp_path):
    torch.save(book_state(huggingface_model()), tmp_path / "model.pth")
    with pytest.raises(
        InputError, match=r"2 blocks of width 48 .* write {\"n_heads\": NUMBER} into config\.json"
    ):
        GPT.from_pretrained(tmp_path / "model.pth")
    for name, heads in (("gpt2-small", 12), ("gpt2-xl", 25)):
        size = GPTConfig.from_name(name)
        state = {f"trf_blocks.{size.num_layers - 1}.norm1.scale": torch.empty(size.emb_dim)}
        for embedding in ("tok_emb.weight", "pos_emb.weight"):
            state[embedding] = torch.empty(10, size.emb_dim, device="meta")
        assert read_config(state, {}).num_heads == heads
