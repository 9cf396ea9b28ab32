import sys

import numpy as np
import pytest
import torch

from gpt import GPT, Tokenizer
from gpt.cli import main
from gpt.weights.commands import write_export
from gpt.weights.load import Found

HEADER = {"context_length": 24, "embedding_length": 48, "block_count": 2, "feed_forward_length": 192}


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, {"qkv_bias": False}])
def test_the_file_read_back(changes, config, tmp_path):
    gguf = pytest.importorskip("gguf")
    model = GPT(type(config).from_dict({**config.to_dict(), **changes}))
    torch.nn.init.normal_(model.blocks[0].attention.out_proj.bias)
    write_export(Found("gpt", model.config, model.state_dict()), tmp_path, "gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    value = {name: field.contents() for name, field in reader.fields.items()}
    assert value["general.architecture"] == "gpt2"
    assert {name: value[f"gpt2.{name}"] for name in HEADER} == HEADER
    assert value["gpt2.attention.head_count"] == 3
    assert value["gpt2.attention.layer_norm_epsilon"] == pytest.approx(1e-5)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert ("output.weight" in tensors) == (not model.config.tie_embeddings)
    assert len(tensors) == 2 + 2 * 12 + 2 + (not model.config.tie_embeddings)
    attention, feed_forward = model.blocks[1].attention, model.blocks[1].feed_forward
    query_key_value = torch.cat([getattr(attention, f"W_{x}").weight for x in ("query", "key", "value")])
    expected = {
        "token_embd.weight": model.token_embedding.weight,
        "position_embd.weight": model.position_embedding.weight,
        "blk.1.attn_qkv.weight": query_key_value,
        "blk.0.attn_output.bias": model.blocks[0].attention.out_proj.bias,
        "blk.1.ffn_up.weight": feed_forward.up.weight,
        "blk.1.ffn_down.weight": feed_forward.down.weight,
        "output_norm.bias": model.final_norm.bias,
    }
    for name, tensor in expected.items():
        np.testing.assert_array_equal(tensors[name], tensor.detach().numpy(), err_msg=name)
    assert not model.config.qkv_bias or tensors["blk.1.attn_qkv.bias"].shape == (144,)


def test_the_tokenizer_is_gpt2s_with_a_small_vocabulary(model, tmp_path):
    gguf = pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    write_export(Found("gpt", model.config, model.state_dict()), tmp_path / "gguf", "gguf")
    write_export(Found("gpt", model.config, model.state_dict()), tmp_path / "hf", "hf")
    fields = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    value = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}
    assert (value["model"], value["pre"]) == ("gpt2", "gpt-2")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert value["tokens"] == theirs.convert_ids_to_tokens(range(300))
    assert len(value["merges"]) == 300 - 257
    assert value["token_type"] == [1] * 299 + [3]
    assert value["bos_token_id"] == value["eos_token_id"] == Tokenizer(vocab_size=300).eot
    assert value["add_bos_token"] is False


def test_a_missing_package_is_one_line(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    model.save_pretrained(tmp_path / "m")
    command = [
        "export",
        "--checkpoint",
        str(tmp_path / "m"),
        "--format",
        "gguf",
        "--output",
        str(tmp_path / "o"),
    ]
    assert main(command) == 2
    assert "pip install -e '.[gguf]'" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
