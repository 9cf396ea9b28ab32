import sys
from dataclasses import replace

import pytest
import torch

from gpt import GPT
from gpt.text.template import Template
from gpt.weights.commands import write_export
from gpt.weights.formats.gguf import modelfile
from gpt.weights.load import StoredModel

EXPECTED = {
    "general.architecture": "gpt2",
    "gpt2.context_length": 24,
    "gpt2.embedding_length": 48,
    "gpt2.block_count": 2,
    "gpt2.feed_forward_length": 192,
    "gpt2.attention.head_count": 3,
    "gpt2.attention.layer_norm_epsilon": pytest.approx(1e-5),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.token_type": [1] * 299 + [3],
    "tokenizer.ggml.bos_token_id": 299,
    "tokenizer.ggml.eos_token_id": 299,
    "tokenizer.ggml.add_bos_token": False,
}
SAME = {
    "token_embd.weight": "token_embedding.weight",
    "position_embd.weight": "position_embedding.weight",
    "blk.0.attn_output.bias": "blocks.0.attention.out_proj.bias",
    "blk.1.ffn_up.weight": "blocks.1.feed_forward.up.weight",
    "blk.1.ffn_down.weight": "blocks.1.feed_forward.down.weight",
    "output_norm.bias": "final_norm.bias",
}


@pytest.mark.parametrize("more", [True, False])
def test_the_file_read_back(more, config, tmp_path):
    """With a tied head and biases of all matrices, and without."""
    gguf = pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    model = GPT(replace(config, tie_embeddings=more, qkv_bias=more))
    torch.nn.init.normal_(model.blocks[0].attention.out_proj.bias)
    stored = StoredModel("gpt", model.config, model.state_dict())
    write_export(stored, tmp_path / "gguf", "gguf")
    assert {file.name for file in (tmp_path / "gguf").iterdir()} == {"model.gguf", "Modelfile"}
    reader = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf")
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert {name: values[name] for name in EXPECTED} == EXPECTED
    write_export(stored, tmp_path / "hf", "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert values["tokenizer.ggml.tokens"] == theirs.convert_ids_to_tokens(range(300))
    assert len(values["tokenizer.ggml.merges"]) == 300 - 257

    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    assert len(tensors) == 2 + 2 * 12 + 2 + ("output.weight" in tensors) == 29 - more
    attention = [model.blocks[1].attention.get_submodule(f"W_{name}") for name in ("query", "key", "value")]
    assert torch.equal(tensors["blk.1.attn_qkv.weight"], torch.cat([part.weight for part in attention]))
    for theirs, ours in SAME.items():
        assert torch.equal(tensors[theirs], model.state_dict()[ours]), theirs


def test_a_missing_package_is_one_line(model, workplace, monkeypatch, refusal):
    monkeypatch.setitem(sys.modules, "gguf", None)
    model.save_pretrained("m")
    ways = "python3 scripts/install.py .venv --extras gguf, or pip install -e '.[gguf]'"
    error = refusal("export m --format gguf --output o")
    assert f"this format needs more packages: {ways}\n" in error
    assert not (workplace / "o").exists()


TEMPLATE = Template(system='"""{{ {content}\\n', user="{content}\té\n", assistant="\\{content}")
MODELFILE = r'''FROM ./model.gguf
TEMPLATE """{}"""
PARAMETER stop "<|endoftext|>"
PARAMETER num_ctx 24
PARAMETER temperature 0.8
PARAMETER top_k 50
PARAMETER top_p 1.0
PARAMETER min_p 0.0
PARAMETER repeat_penalty 1.0
'''
GO = (
    r'{{ "<|endoftext|>" }}{{ range .Messages }}'
    r'{{ if eq .Role "system" }}{{ "\"\"\"{{ " }}{{ .Content }}{{ "\\n" }}'
    r'{{ else if eq .Role "user" }}{{ .Content }}{{ "\té\n" }}'
    r'{{ else if eq .Role "assistant" }}{{ "\\" }}{{ .Content }}{{ "<|endoftext|>" }}'
    r'{{ end }}{{ end }}{{ "\\" }}'
)


@pytest.mark.parametrize(("template", "go"), [(None, "{{ .Prompt }}"), (TEMPLATE, GO)], ids=["text", "chat"])
def test_a_modelfile_has_the_template_as_constants_of_go_and_how_a_text_is_drawn(template, go, config):
    assert modelfile(config, template) == MODELFILE.replace("{}", go)
