from pathlib import Path

import pytest
import torch
from other_programs import huggingface_model, nanogpt_checkpoint
from tiny_runs import gpt

from gpt import GPT, Tokenizer, generate
from gpt.errors import InputError
from gpt.weights.commands import import_weights, write_export
from gpt.weights.load import StoredModel, read_weights


@pytest.fixture
def theirs():
    return huggingface_model(activation_function="gelu")  # nanoGPT computes it exactly


@pytest.mark.parametrize("bias", [True, False])
def test_logits_of_an_imported_checkpoint(bias, theirs, tokens, tmp_path):
    """Also one of a compiled model, and with the masks of nanoGPT without flash attention."""
    checkpoint = nanogpt_checkpoint(theirs, bias=bias)
    for name, parameter in theirs.named_parameters():
        parameter.data *= bias or not name.endswith(".bias")
    state = {**checkpoint["model"], "transformer.h.1.attn.bias": torch.ones(1, 1, 24, 24).tril()}
    checkpoint["model"] = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    for path in (tmp_path, tmp_path / "ckpt.pt"):
        torch.testing.assert_close(
            GPT.from_pretrained(path)(tokens), theirs(tokens).logits, atol=1e-4, rtol=0
        )


def test_an_export_is_what_train_py_saves(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "hf")
    write_export(read_weights(tmp_path / "hf"), tmp_path / "nano", "nanogpt")
    exported = torch.load(tmp_path / "nano" / "ckpt.pt", weights_only=True)
    expected = nanogpt_checkpoint(theirs)
    assert exported["model_args"] == {**expected["model_args"], "dropout": 0.1}
    torch.testing.assert_close(exported["model"], expected["model"], rtol=0, atol=0)


def test_an_untied_head_is_refused(config, tmp_path):
    untied = GPT(type(config).from_dict({**config.to_dict(), "tie_embeddings": False}))
    own = Tokenizer("own", table=[bytes([byte]) for byte in range(256)])  # no file of it is left either
    with pytest.raises(InputError, match="always ties the head"):
        write_export(StoredModel("gpt", untied.config, untied.state_dict(), own), tmp_path / "out", "nanogpt")
    assert not (tmp_path / "out").exists()


def test_a_character_model_has_no_tokenizer(workplace, refusal, capsys):
    """Its alphabet is in a pickle, which is not read. What `gpt import` prints works."""
    torch.save(nanogpt_checkpoint(huggingface_model(vocab_size=65)), workplace / "ckpt.pt")
    told = refusal("export ckpt.pt --output out")
    assert "have no tokenizer of their own, and 65 rows: GPT-2's needs at least 257" in told
    assert not Path("out").exists()
    assert gpt("export ckpt.pt --output out --format nanogpt") == 0
    assert [file.name for file in Path("out").iterdir()] == ["ckpt.pt"]
    capsys.readouterr()
    import_weights("ckpt.pt", Path("mine"))
    told = capsys.readouterr().out
    assert "no tokenizer" in told and "gpt generate" not in told
    call = told.splitlines()[-1]
    assert call == "gpt.generate(GPT.from_pretrained('mine'), [[0]], max_new_tokens=20)"
    (ids,) = generate(GPT.from_pretrained("mine"), [[0]], max_new_tokens=20)
    assert len(ids) == 21 and max(ids) < 65
