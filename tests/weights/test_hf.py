import json
import re
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from other_programs import huggingface_model
from safetensors.torch import save_file

from gpt import GPT, Tokenizer
from gpt.errors import InputError
from gpt.files import write_json
from gpt.share.export import export_weights
from gpt.weights.checkpoint import RunPart
from gpt.weights.commands import write_export
from gpt.weights.formats.hf import write_tokenizer
from gpt.weights.load import StoredModel, read_weights
from tests.snapshots import add_checkpoint, add_snapshot


@pytest.fixture
def folder(tmp_path):
    huggingface_model().save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"activation_function": "gelu"}])
def test_either_direction_keeps_the_logits(changes, tokens, tmp_path):
    from transformers import AutoModelForCausalLM

    theirs = huggingface_model(**changes)
    theirs.save_pretrained(tmp_path / "theirs")
    stored = read_weights(tmp_path / "theirs")
    assert stored.format == "hf"
    write_export(stored, tmp_path / "ours", "hf")
    exported, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(exported.eval()(tokens).logits, theirs(tokens).logits, atol=1e-4, rtol=0)
    ours = GPT.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    assert (ours.head.weight is ours.token_embedding.weight) == changes.get("tie_word_embeddings", True)


def test_the_first_folders_of_the_hub_with_masks_and_without_prefix(folder, tokens):
    """They hold the names of the bare GPT2Model."""
    theirs = huggingface_model()
    state = {k.removeprefix("transformer."): v for k, v in theirs.state_dict().items() if "lm_head" not in k}
    for i in range(2):
        state[f"h.{i}.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
        state[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, folder / "model.safetensors")
    logits = GPT.from_pretrained(folder)(tokens)
    torch.testing.assert_close(logits, theirs(tokens).logits, atol=1e-4, rtol=0)


def test_an_exported_tokenizer_pads_a_batch_and_gives_no_token_types(model, tmp_path):
    """transformers 4 would add token types, and to the embeddings what stands in their rows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_export(StoredModel("gpt", model.config, model.state_dict()), tmp_path, "hf")
    batch = AutoTokenizer.from_pretrained(tmp_path)(["ab", "abcd"], padding=True)
    assert batch.keys() == {"input_ids", "attention_mask"}
    assert batch["input_ids"][0][2:] == [299, 299]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (299, 299, 299)


MISMATCHES = {
    "another architecture": (
        {"model_type": "llama"},
        "model_type is 'llama' in config.json, expected 'gpt2'",
    ),
    "another width": ({"n_inner": 100}, "n_inner is 100 in config.json, expected 192"),
    "another constant": (
        {"layer_norm_epsilon": 1e-6},
        "layer_norm_epsilon is 1e-06 in config.json, expected 1e-05",
    ),
    "more layers": ({"n_layer": 3}, r"lack transformer\.h\.2\.ln_1\.weight of shape \(48,\)"),
    "fewer layers": ({"n_layer": 1}, r"hold transformer\.h\.1\.attn\.c_attn\.bias of shape \(144,\)"),
    "more positions": (
        {"n_positions": 32},
        r"transformer\.wpe\.weight has shape \(24, 48\), expected \(32, 48\)",
    ),
}


@pytest.mark.parametrize(("values", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_named_with_both_values(folder, values, message):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | values), "utf-8")
    with pytest.raises(InputError, match=message) as raised:
        GPT.from_pretrained(folder)
    assert "\n" not in str(raised.value) and str(folder) in str(raised.value)


@pytest.fixture
def card_of(tmp_path, model):
    """Exports the last checkpoint of a run on this corpus; returns the text of its model card."""

    def export(corpus: str, **options) -> str:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        bits = {"val_bits_per_byte": 1.5, "val_loss": 3.0}
        state = RunPart(options={"data": {"corpus": corpus}}, step=7, seconds=90.0, validation=bits)
        run = tmp_path / "runs" / "mine"
        add_checkpoint(run, model, Tokenizer(vocab_size=300), state)
        write_json(run / "summary.json", {"text": "the whole run's", "val_bits_per_byte": 1.1})
        export_weights(str(run), tmp_path / "out", **options)
        return (tmp_path / "out" / "README.md").read_text("utf-8")

    return export


def test_an_export_has_a_model_card_and_goes_to_the_hub(card_of, tmp_path, monkeypatch):
    """The card names the text and the figures of the run, and leaves the license to its owner."""
    sent = []
    monkeypatch.setattr("huggingface_hub.create_repo", lambda *name, **how: sent.append((*name, how)))
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **how: sent.append(how))
    card = card_of("texts/novel.txt", push="owner/name")
    assert "| text | novel.txt |\n| bits_per_byte | 1.5 |\n| minutes | 1.5 |\n" in card
    assert "| num_layers | 2 |" in card and "\n# owner/name\n" in card
    facts = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert yaml.safe_load(card.split("---")[1]) == facts
    folder = {"repo_id": "owner/name", "folder_path": tmp_path / "out"}
    assert sent == [("owner/name", {"exist_ok": True}), folder]


def test_the_card_of_a_snapshot_has_no_figures_of_the_whole_run(card_of, model, tmp_path):
    card_of("novel.txt")
    snapshot = add_snapshot(tmp_path / "runs" / "mine", 1, model, Tokenizer(vocab_size=300))
    export_weights(str(snapshot), tmp_path / "early")
    card = (tmp_path / "early" / "README.md").read_text("utf-8")
    assert "| parameters |" in card and not re.search(r"bits_per_byte|minutes|text \|", card)


HOSTILE = {
    "a table": "a | b\n\n# Heading\n| x | y |",
    "HTML": "<script>alert(1)<img src=x onerror=alert(1)> &lt; & \\",
    "links": "[link](https:a.example) ![p](http:a.example) https:a.example www.a.example me@a.example",
    "styles": "`code` *bold* _x_ ~~y~~ $z$ $$w$$",
    "a long text": "x" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_the_name_of_a_strangers_text_is_shown_in_the_card_letter_by_letter(name, card_of):
    markdown = pytest.importorskip("markdown_it").MarkdownIt("gfm-like", {"linkify": False}).enable("table")
    card = card_of(name)
    assert len(card) < 2000 and "https:" not in card and "www.a" not in card  # which become links elsewhere
    tokens = markdown.parse(card.split("---", 2)[2].partition("\n\nA GPT-2")[2])
    cells = [token for token in tokens if token.type == "inline"][1:]
    assert {child.type for cell in cells for child in cell.children} <= {"text", "text_special"}
    shown = ["".join(child.content for child in cell.children) for cell in cells]
    rows = dict(zip(shown[2::2], shown[3::2], strict=True))
    expected = " ".join(name.split())
    assert rows["text"] == (expected if len(expected) <= 200 else f"{expected[:200]}...")


@pytest.mark.parametrize(("push", "form"), [("name", "hf"), ("a/b/c", "hf"), ("owner/name", "gguf")])
def test_a_push_that_the_hub_would_refuse_writes_nothing(push, form):
    with pytest.raises(InputError, match=r"--push .*: expected OWNER/NAME of the hub, and --format hf"):
        export_weights("gpt2", Path("out"), form, push)
    assert not Path("out").exists()


SIZES = (257, 300, 50257)
TEXTS = [
    "Hello, world! It's 12345 o'clock.  \n\n\tdef f(x):\n    return x ** 2\n",
    "naïve café — “quotes” … 你好 мир 🤖👩‍👩‍👧 \u00a0\u200b\x00\x7f",
    "  leading and trailing 'S 'll I'VE we'd\r\n",
]


@cache
def pair(size: int):
    from transformers import AutoTokenizer

    tokenizer = Tokenizer("gpt2", vocab_size=size)
    with TemporaryDirectory() as folder:
        write_tokenizer(tokenizer, Path(folder), context_length=64)
        return tokenizer, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("size", SIZES)
@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
@example(TEXTS[0])
@example(TEXTS[1])
@example(TEXTS[2])
@settings(max_examples=100, deadline=None)
def test_transformers_gives_the_same_ids_for_any_text(size, text):
    ours, theirs = pair(size)
    ids = ours.encode(text)
    assert theirs(text, split_special_tokens=True)["input_ids"] == ids
    assert theirs.decode(ids) == text


@pytest.mark.parametrize("size", SIZES)
def test_endoftext_is_the_last_id(size):
    ours, theirs = pair(size)
    assert len(theirs) == size
    assert theirs.eos_token_id == ours.eot == size - 1
    assert theirs.model_max_length == 64
    text = "one<|endoftext|>two"
    assert theirs(text)["input_ids"] == ours.encode(text, allow_special=True)
