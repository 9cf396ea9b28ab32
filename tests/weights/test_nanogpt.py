from pathlib import Path

import pytest
import torch
from other_programs import NanoGPT, nanogpt_checkpoint, tanh_gelu

from gpt import GPT, Tokenizer, generate
from gpt.errors import InputError
from gpt.weights.commands import import_weights, write_export
from gpt.weights.load import Found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_logits_of_an_imported_checkpoint(bias, prefix, tokens, tmp_path):
    checkpoint = nanogpt_checkpoint(bias=bias)
    expected = NanoGPT(checkpoint)(tokens)
    checkpoint["model"] = {prefix + name: tensor for name, tensor in checkpoint["model"].items()}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    for path in (tmp_path, tmp_path / "ckpt.pt"):
        torch.testing.assert_close(GPT.from_pretrained(path)(tokens), expected, atol=1e-5, rtol=0)


def test_masks_of_nanogpt_without_flash_attention_are_skipped(tokens, tmp_path):
    checkpoint = nanogpt_checkpoint()
    expected = NanoGPT(checkpoint)(tokens)
    for i in range(2):
        checkpoint["model"][f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    torch.testing.assert_close(GPT.from_pretrained(tmp_path)(tokens), expected, atol=1e-5, rtol=0)


def test_logits_of_an_exported_checkpoint(model, tokens, tmp_path):
    write_export(Found("gpt", model.config, model.state_dict()), tmp_path, "nanogpt")
    checkpoint = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert set(checkpoint["model_args"]) == set(nanogpt_checkpoint()["model_args"])
    assert set(checkpoint["model"]) == set(nanogpt_checkpoint()["model"])
    assert {k: v.shape for k, v in checkpoint["model"].items()} == {
        k: v.shape for k, v in nanogpt_checkpoint()["model"].items()
    }
    torch.testing.assert_close(NanoGPT(checkpoint, tanh_gelu)(tokens), model(tokens), atol=1e-5, rtol=0)
    read_back = GPT.from_pretrained(tmp_path)
    torch.testing.assert_close(read_back(tokens), model(tokens), atol=1e-6, rtol=0)
    assert read_back.config == model.config


def test_an_untie_embeddings_is_refused(config, tmp_path):
    untied = GPT(type(config).from_dict({**config.to_dict(), "tie_embeddings": False}))
    own = Tokenizer("own", table=[bytes([byte]) for byte in range(256)])  # no file of it is left either
    with pytest.raises(InputError, match="always ties the head"):
        write_export(Found("gpt", untied.config, untied.state_dict(), own), tmp_path / "out", "nanogpt")
    assert not (tmp_path / "out").exists()


def test_a_missing_setting_or_wrong_shape_is_named(tmp_path):
    checkpoint = nanogpt_checkpoint()
    del checkpoint["model_args"]["n_head"]
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    with pytest.raises(InputError, match="model_args lacks 'n_head'"):
        GPT.from_pretrained(tmp_path)
    checkpoint = nanogpt_checkpoint()
    checkpoint["model"]["transformer.h.1.mlp.c_fc.weight"] = torch.zeros(48, 192)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    match = r"transformer\.h\.1\.mlp\.c_fc\.weight has shape \(48, 192\), expected \(192, 48\)"
    with pytest.raises(InputError, match=match):
        GPT.from_pretrained(tmp_path)


def test_a_character_model_continues_ids_as_the_import_says(tmp_path, monkeypatch, capsys):
    """Its alphabet is in a pickle, which is not read; what is printed works."""
    monkeypatch.chdir(tmp_path)
    torch.save(nanogpt_checkpoint(vocab_size=65), tmp_path / "ckpt.pt")
    import_weights("ckpt.pt", Path("mine"))
    told = capsys.readouterr().out
    assert "65 ids and no tokenizer" in told and "gpt generate" not in told
    call = told.splitlines()[-1]
    assert call == "gpt.generate(GPT.from_pretrained('mine'), [[0]], max_new_tokens=20)"
    (ids,) = generate(GPT.from_pretrained("mine"), [[0]], max_new_tokens=20)
    assert len(ids) == 21 and max(ids) < 65
