"""What `gpt export --format html` writes."""

import os
import re
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
import torch
from demo import DEMO, renewed
from tiny_runs import gpt

from gpt import GPTConfig, Tokenizer
from gpt.config import USUAL_TEMPERATURE, USUAL_TOP_K
from gpt.errors import InputError
from gpt.evaluation.copied import Copied
from gpt.generation.write import write as write_texts
from gpt.share import file
from gpt.share.page import served_page
from gpt.weights.checkpoint import RunPart
from gpt.weights.load import StoredModel
from gpt.weights.runs import snapshots_of
from tests.generation.conftest import sharp
from tests.share.node import export, needs_node, run
from tests.snapshots import add_checkpoint, add_snapshot

SCRIPTS = Path(file.__file__).parent
SHAPE = GPTConfig(vocab_size=300, context_length=32, emb_dim=48, num_heads=3, num_layers=2)
TOKENIZER = Tokenizer(vocab_size=300)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_folder_whose_name_is_not_utf8_is_exported(workplace):
    snapshot = add_snapshot(workplace / os.fsdecode(b"caf\xe9"), 1, sharp(SHAPE), TOKENIZER)
    assert gpt(f"export {snapshot} --format html --output it.html") == 0
    assert r'"name": "caf\\udce9"' in (workplace / "it.html").read_text("utf-8")
    assert gpt(f"export {snapshot} --output exported") == 0


@needs_node
def test_snapshots_are_spread_over_the_steps_within_their_megabytes(tmp_path):
    model, last = sharp(SHAPE), sharp(SHAPE, seed=64)
    for step in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64):
        add_snapshot(tmp_path, step, last, TOKENIZER, float("nan") if step == 1 else 9 / step)
    page = export(tmp_path / "it.html", model).read_text("utf-8")
    megabytes = int(re.search(r'"bytes": (\d+)', page)[1]) * 4 / 3e6  # of a snapshot

    def with_room_for(count: float):
        room = {"snapshots": snapshots_of(tmp_path), "megabytes": count * megabytes}
        return export(tmp_path / "it.html", model, **room)

    path = with_room_for(5.5)
    about, _, logits = run(path, ["about"], ["last", [3, 4, 5]], ["last", [3, 4, 5], 64])
    first, *others = kept = about["snapshots"]
    assert len(kept) == 5 and (first, kept[-1]) == (1, 64)
    assert all(after / before <= 4 for before, after in zip(kept, others, strict=False))
    assert about["train"] == [[step, pytest.approx(9 / step, abs=1e-4)] for step in others]
    expected = last(torch.tensor([[3, 4, 5]]))[0, -1].detach()
    torch.testing.assert_close(torch.tensor(logits), expected, atol=expected.std().item() / 20, rtol=0)

    assert run(with_room_for(1.9), ["about"])[0]["snapshots"] == []


def test_the_size_is_that_of_the_file_with_its_text(tmp_path):
    path, stored = tmp_path / "it.html", StoredModel("gpt", SHAPE, sharp(SHAPE).state_dict())
    said = file.write(path, stored, name="tiny", text=np.full(300_000, 5000, np.uint16))
    assert f"{path.stat().st_size / 1e6:.1f} MB" in said  # a letter of the text takes up to three bytes


def test_the_sliders_of_the_page_begin_with_what_gpt_generate_takes():
    page, _ = served_page()
    for name, value in (("temperature", USUAL_TEMPERATURE), ("top_k", USUAL_TOP_K)):
        (slider,) = re.findall(f'<input [^>]*id="{name}"[^>]*>', page)
        assert f' value="{value}"' in slider


def numbers_of(script: str) -> dict[str, int]:
    """The numbers that a script of the page names at its beginning."""
    text = (SCRIPTS / script).read_text("utf-8")
    return {name: int(value) for name, value in re.findall(r"^const ([A-Z_]+) = (\d+);", text, re.M)}


def test_a_page_and_the_commands_count_the_same_as_copied():
    least = {
        numbers_of("worker.js")["SHORTEST_RUN"],
        signature(Copied).parameters["least"].default,
        signature(write_texts).parameters["copied_tokens"].default,
    }
    assert least == {12}


def test_a_page_asks_for_as_many_alternatives_as_a_worker_and_the_server_give():
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from gpt.serve.requests import ALTERNATIVES

    (asked,) = re.findall(r"logprobs: (\d+)", (SCRIPTS / "page.js").read_text("utf-8"))
    assert int(asked) == numbers_of("worker.js")["LIKELIEST"] == ALTERNATIVES


OTHERS = {
    "shape": (replace(SHAPE, num_heads=2), TOKENIZER),
    "size": (replace(SHAPE, num_layers=1), TOKENIZER),
    "vocabulary": (replace(SHAPE, vocab_size=257), Tokenizer(vocab_size=257)),
    "order of tokens": (SHAPE, Tokenizer("own", table=[*TOKENIZER.tokens[:-1], b"zzz"])),
}


@pytest.mark.parametrize(("shape", "tokenizer"), OTHERS.values(), ids=OTHERS)
def test_a_snapshot_of_another_model_is_refused(shape, tokenizer, tmp_path):
    snapshot = add_snapshot(tmp_path, 4, sharp(shape), tokenizer)
    with pytest.raises(InputError, match=f"{snapshot.name} has another shape or vocabulary than the model"):
        export(tmp_path / "it.html", sharp(SHAPE), TOKENIZER, snapshots=snapshots_of(tmp_path))
    assert not (tmp_path / "it.html").exists()


def test_a_snapshot_with_another_dropout_and_an_only_one_are_written(tmp_path):
    add_snapshot(tmp_path, 4, sharp(replace(SHAPE, dropout=0.3)), TOKENIZER)
    page = export(tmp_path / "it.html", sharp(SHAPE), TOKENIZER, snapshots=snapshots_of(tmp_path))
    assert '{"step": 4, "loss": 5.0}' in page.read_text("utf-8")


@needs_node
@pytest.mark.parametrize(
    "change",
    [lambda text: text[:-4], lambda text: "!" + text[1:], lambda text: "B" + text[1:]],
    ids=["cut off", "no base64", "other bits"],
)
def test_a_changed_block_is_refused(change, tmp_path):
    path = export(tmp_path / "it.html", sharp(SHAPE))
    text = re.search(r'"block0">(.*?)<', path.read_text("utf-8"))[1]
    message, whole = run(path, ["broken", "load", {"text": change(text)}], ["broken", "load", {"text": text}])
    assert "damaged or incomplete" in message and whole is None


EXPORT = "export runs/mine --format html"


@pytest.fixture
def place(workplace):
    """The folder of a run with a checkpoint."""
    state = RunPart(options={"data": {"corpus": "my.txt"}}, seconds=60.0)
    add_checkpoint(workplace / "runs" / "mine", sharp(SHAPE), TOKENIZER, state)
    return workplace


@pytest.mark.parametrize(("options", "name"), [(" --output mine.html", "mine.html"), ("", "exported.html")])
def test_the_command_writes_a_file_and_its_size(options, name, place, capsys):
    """One without a name can be opened by a double click."""
    assert gpt(EXPORT + options) == 0
    page = (place / name).read_text("utf-8")
    told = f"{name} has {len(page.encode()) / 1e6:.1f} MB: the model in int8"
    assert capsys.readouterr().out.startswith(told)
    assert '"name": "mine"' in page and "connect-src 'none'" in page and "://" not in page
    figures = '"text": "my.txt", "bits_per_byte": null, "minutes": 1.0'
    assert f'"parameters": {sharp(SHAPE).num_parameters()}, {figures}' in page


def test_the_command_refuses_what_it_cannot_write(place, refusal, monkeypatch):
    (place / "mine.html").touch()
    assert "mine.html exists already" in refusal(f"{EXPORT} --output mine.html")
    (place / "folder").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("gpt.share.export.read_weights", lambda _: pytest.fail("weights are read"))
        assert "folder exists already" in refusal(f"{EXPORT} --output folder")
    assert "runs/mine is not at hand" in refusal(f"{EXPORT} --output text.html --with_text")
    monkeypatch.setattr(file, "LARGEST", 50_000)
    error = refusal(f"{EXPORT} --output large.html")
    assert "MB, more than 0" in error and "--snapshot_megabytes 0" in error
    assert not (place / "large.html").exists()


@pytest.mark.parametrize(
    ("format", "option"),
    [
        ("hf", "--precision int8"),  # the page's default, but not what hf would write
        ("gguf", "--precision float16"),
        ("nanogpt", "--snapshot_megabytes 8"),
        ("book", "--with_text"),
    ],
)
def test_other_formats_refuse_the_options_of_html(format, option, place, refusal):
    told = refusal(f"export runs/mine --format {format} {option}")
    name = option.split()[0]
    assert told == f"gpt export: {name}: expected only with --format html, got {format}; leave it out\n"
    assert not (place / "exported").exists()


def test_any_finite_number_of_megabytes_is_taken(place, refusal):
    told = refusal(f"{EXPORT} --snapshot_megabytes 1e400")
    assert "--snapshot_megabytes: expected a finite number, got inf" in told
    assert not (place / "exported.html").exists()
    assert gpt(f"{EXPORT} --snapshot_megabytes 1e308") == 0


def test_the_demo_has_the_present_page():
    """If this fails: python scripts/demo.py"""
    page = DEMO.read_text("utf-8")
    assert renewed(page) == page
