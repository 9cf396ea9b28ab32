import json
import os
import pickle
import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import gpt

from gpt import GPT, GPTConfig, Tokenizer
from gpt.errors import InputError
from gpt.text.template import DEFAULT_TEMPLATE
from gpt.weights.commands import write_export
from gpt.weights.formats import book, hf, nanogpt
from gpt.weights.formats.table import check_complete, from_gpt, to_gpt
from gpt.weights.load import StoredModel, choose_device, find, read_weights
from gpt.weights.runs import model_name


def test_export_and_import_are_inverse_and_write_over_nothing(model, workplace, refusal, capsys):
    model.save_pretrained("mine")
    for format in ("hf", "nanogpt", "book"):
        assert gpt(f"export mine --format {format} --output {format}") == 0
        assert gpt(f"import {format} --format {format} --output from-{format}") == 0
        read_back = GPT.from_pretrained(f"from-{format}")
        assert read_back.config == replace(model.config, exact_gelu=format == "nanogpt")
        torch.testing.assert_close(read_back.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert "nanoGPT computes the exact GELU" in capsys.readouterr().err
    for command in ("import hf --output mine", "export mine --output hf"):
        assert "exists already: choose another name" in refusal(command)
    assert "in the format hf, expected book" in refusal("import hf --format book --output new")


UNKNOWN = {
    "own": (None, ["lm_head.weight", "out_head.weight", "blocks.0.attn.bias"]),
    "hf": (hf.TABLE, ["head.weight", "out_head.weight", "transformer.h.0.att.mask"]),
    "nanogpt": (nanogpt.TABLE, ["head.weight", "transformer.foo.attn.bias"]),
    "book": (book.TABLE, ["head.weight", "lm_head.weight", "trf_blocks.0.attn.bias"]),
}


@pytest.mark.parametrize(("table", "names"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_head_or_mask_of_another_format_is_not_dropped(table, names, config, model):
    """As a model that computes with it would be another one."""
    weights = check_complete(config, model.state_dict())
    state = weights if table is None else from_gpt(config, weights, table)
    for name in names:
        more = {**state, name: torch.zeros(3)}
        with pytest.raises(InputError, match=re.escape(f"the weights hold {name} of shape (3,)")):
            check_complete(config, more) if table is None else to_gpt(config, more, table)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("legacy", [True, False])
def test_no_code_of_a_pickle_is_run(legacy, workplace):
    bomb = {"model": Bomb(), "model_args": {}, "tok_emb.weight": Bomb()}
    torch.save(bomb, "ckpt.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(InputError, match="not a file of tensors"):
        GPT.from_pretrained("ckpt.pt")
    assert not Path("exploded").exists()
    pickle.loads(pickle.dumps(Bomb()))  # an ordinary unpickler runs it
    assert Path("exploded").exists()


FLOATS = torch.zeros(3, 768)
UNKNOWN = {
    "other bytes": (b"junk" * 100, "not a file of tensors"),
    "a tensor": (FLOATS, "expected a dictionary of tensors"),
    "other names": ({"weight": FLOATS}, "no checkpoint .*, and no state dict of the book's"),
    "no names": ({1: FLOATS}, "no checkpoint .*, and no state dict of the book's"),
    "no settings": ({"model": {}, "model_args": 3}, "settings"),
    "a sparse tensor": ({"tok_emb.weight": FLOATS.to_sparse()}, "not a file of tensors"),
}


@pytest.mark.parametrize(("content", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_file_is_one_line(content, message, tmp_path):
    file = tmp_path / "weights.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(InputError, match=message) as raised:
        GPT.from_pretrained(file)
    assert "\n" not in str(raised.value) and str(file) in str(raised.value)


@pytest.mark.parametrize("name", ["runs/none", "here/name", "a/b/c", "gpt3"])
def test_a_name_that_can_only_be_a_path_never_asks_the_network(name, workplace):
    Path("here").mkdir()
    with pytest.raises(InputError, match="no checkpoint at"):
        find(name)


BYTES = [bytes([byte]) for byte in range(256)]


def test_a_tokenizer_with_more_tokens_than_the_weights_have_rows(config):
    model = GPT(replace(config, vocab_size=256))
    stored = StoredModel("gpt", model.config, model.state_dict(), Tokenizer("own", table=BYTES))
    with pytest.raises(InputError, match="the tokenizer has 257 tokens, but the weights have 256 rows"):
        stored.cropped()


def test_more_positions_lie_on_lines_between_those_of_the_weights(config, model):
    """Every other one of 47 positions is one of the 24, the rest are means. A single one is repeated."""
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    stored = StoredModel("gpt", config, weights)
    longer = stored.with_positions(47)
    assert longer.config == replace(config, context_length=47)
    before = weights["position_embedding.weight"].float()
    after = longer.weights["position_embedding.weight"]
    torch.testing.assert_close(after[::2], before)
    torch.testing.assert_close(after[1::2], (before[1:] + before[:-1]) / 2)
    assert longer.weights["final_norm.weight"].data_ptr() == weights["final_norm.weight"].data_ptr()
    repeated = stored.with_positions(1).with_positions(3).weights["position_embedding.weight"]
    torch.testing.assert_close(repeated.float(), before[:1].expand(3, -1))
    with pytest.raises(InputError, match="context_length 1000000 needs a mask larger than the weights"):
        stored.with_positions(1_000_000)


OWN_TABLE = [*BYTES, *(b"%c%c" % (97 + number // 26, 97 + number % 26) for number in range(41))]


@pytest.fixture
def foreign(workplace):
    """A folder of transformers with tokens of its own: 297, the end of a text, and two rows that pad."""
    config = GPTConfig(vocab_size=300, context_length=4, emb_dim=8, num_heads=2, num_layers=1)
    folder = workplace / "theirs"
    hf.write(config, GPT(config).state_dict(), folder)
    hf.write_tokenizer(Tokenizer("own", table=OWN_TABLE), folder, config.context_length)
    return folder


def test_the_end_of_a_text_is_the_row_of_that_name(foreign):
    """Another added token stands before it."""
    first = read_weights(foreign)
    file = foreign / "tokenizer.json"
    saved = json.loads(file.read_text("utf-8"))
    end = saved["added_tokens"][0]
    assert end["id"] == 297
    saved["added_tokens"] = [{**end, "content": "<pad>"}, {**end, "id": 299}]
    file.write_text(json.dumps(saved), "utf-8")
    swapped = torch.tensor([*range(297), 299, 298, 297])
    rows = load_file(foreign / "model.safetensors")["transformer.wte.weight"]
    stored = read_weights(foreign)
    torch.testing.assert_close(stored.weights["token_embedding.weight"], rows[swapped], rtol=0, atol=0)
    assert stored.tokenizer == first.tokenizer
    end["id"] = 300
    saved["added_tokens"] = [end]
    file.write_text(json.dumps(saved), "utf-8")
    with pytest.raises(InputError, match="the end of a text has the id 300, but the weights have 300 rows"):
        read_weights(foreign)


def test_tokens_in_two_files_are_read_and_those_in_none_are_named(foreign, capsys):
    saved = json.loads((foreign / "tokenizer.json").read_text("utf-8"))
    (foreign / "tokenizer.json").unlink()
    assert read_weights(foreign).own_tokenizer is None
    assert "theirs has no tokenizer: its 300 tokens are taken for the first of GPT-2's" in (
        capsys.readouterr().err
    )
    vocabulary = {**saved["model"]["vocab"], "<|endoftext|>": 297}
    (foreign / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    pairs = "\n".join(map(" ".join, saved["model"]["merges"]))
    (foreign / "merges.txt").write_text(f"#version: 0.2\n{pairs}\n", "utf-8")
    assert read_weights(foreign).tokenizer == Tokenizer("own", table=OWN_TABLE)
    assert not capsys.readouterr().err


PADDED = {
    "GPT-2's": (50304, None, 50257),
    "its own": (300, Tokenizer("own", table=[*BYTES, b"ab", b"cd", b"ef"]), 260),
}


@pytest.mark.parametrize(("rows", "tokenizer", "size"), PADDED.values(), ids=PADDED)
def test_a_vocabulary_is_exported_without_padding(rows, tokenizer, size, tmp_path):
    padded = GPT(GPTConfig(vocab_size=rows, context_length=4, emb_dim=8, num_heads=2, num_layers=1)).eval()
    write_export(StoredModel("gpt", padded.config, padded.state_dict(), tokenizer), tmp_path, "hf")
    exported = GPT.from_pretrained(tmp_path)
    assert exported.config.vocab_size == size
    tokens = torch.tensor([[size - 1, 5]])
    torch.testing.assert_close(exported(tokens), padded(tokens)[..., :size], atol=1e-5, rtol=0)


def test_weights_that_are_whole_numbers_are_not_exported(model, workplace, refusal):
    model.save_pretrained("m")
    state = {**load_file("m/model.safetensors"), "final_norm.bias": torch.zeros(48).long()}
    save_file(state, "m/model.safetensors")
    told = "final_norm.bias has shape (48,), expected (48,) in floating point"
    assert told in refusal("export m --output o --format hf")
    assert not Path("o").exists()


def test_a_file_that_is_named_is_read_whatever_lies_beside_it(model, tmp_path):
    """A folder stands for a checkpoint of nanoGPT before its `model.safetensors`.

    Another name than this one has no shape beside it, without which nothing can be read.
    """
    model.save_pretrained(tmp_path)
    other = tmp_path / "other.safetensors"
    other.write_bytes((tmp_path / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=r"of another program, give the folder with its config\.json"):
        read_weights(other)
    write_export(StoredModel("gpt", model.config, model.state_dict()), tmp_path / "nanogpt", "nanogpt")
    (tmp_path / "nanogpt" / "ckpt.pt").rename(tmp_path / "ckpt.pt")
    expected = {"model.safetensors": "gpt", "ckpt.pt": "nanogpt", "": "nanogpt"}
    for name, format in expected.items():
        found = find(tmp_path / name)
        assert read_weights(tmp_path / name).format == read_weights(found).format == format
        assert model_name(tmp_path / name, found) == (Path(name).stem or tmp_path.name)


@pytest.fixture
def hub(workplace, monkeypatch):
    """A hub with the files of one folder; returns it and the names and revisions that it is asked for."""
    files, cache, asked = workplace / "hub", workplace / "c0ffee", []
    files.mkdir()
    cache.mkdir()

    def snapshot_download(name, revision, allow_patterns):
        asked.append((name, revision))
        if revision == "old":
            raise OSError("no revision old")
        for file in files.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                (cache / file.name).write_bytes(file.read_bytes())
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return files, asked


def test_the_tokenizer_of_a_hub_model_comes_along(hub, model):
    """As from a folder: without it the ids would be read as GPT-2's."""
    files, _ = hub
    tokenizer = Tokenizer("own", table=[*BYTES, b"ab", b"cd"])
    stored = StoredModel("gpt", model.config, model.state_dict(), tokenizer, DEFAULT_TEMPLATE)
    files.rmdir()
    write_export(stored, files, "hf")
    stored = read_weights("owner/name")
    assert stored.tokenizer == tokenizer
    assert stored.template == DEFAULT_TEMPLATE


def test_a_hub_model_is_taken_at_the_revision_that_is_named(hub, capsys):
    _, asked = hub
    assert find("someone/weights@c0ffee").name == find("distilgpt2@main").name == "c0ffee"
    assert "takes the same weights" not in capsys.readouterr().err
    find("someone/weights")
    assert "someone/weights@c0ffee takes the same weights at any time" in capsys.readouterr().err
    assert asked == [("someone/weights", "c0ffee"), ("distilgpt2", "main"), ("someone/weights", None)]
    with pytest.raises(InputError, match="weights@old, and not available on the hub: no revision old"):
        find("someone/weights@old")


def test_auto_takes_the_device_that_fit_takes(monkeypatch):
    for cuda, mps, expected in ((True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert choose_device().type == expected
    assert choose_device("cpu").type == "cpu"


@pytest.mark.parametrize("command", ["evaluate --data text.txt", "attention --text a", "generate", "serve"])
def test_each_command_has_an_option_for_the_device(command, model, workplace, monkeypatch, refusal):
    model.save_pretrained("model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no device cuda here" in refusal(f"{command} --checkpoint model --device cuda")
