"""From examples to a chat: one tiny run that the tests below use."""

import csv
import io
import json
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY

from gpt import generate
from gpt.cli import main
from gpt.data.module import TokenData
from gpt.run.lightning_private import silence_warnings
from gpt.text.template import Template
from gpt.weights.load import load_with_template

TEMPLATE = Template(system="[{content}]", user="Q: {content}\n", assistant="A: {content}")
OPTIONS = [
    *("--data.template.user", "Q: {content}\n", "--data.template.assistant", "A: {content}"),
    *("--data.template.system", "[{content}]", "--model.config.context_length", "32"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    silence_warnings()
    folder = tmp_path_factory.mktemp("examples")
    rows = [{"prompt": f"Say {i}", "completion": f"{i} it is"} for i in range(200)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "pairs.jsonl").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*TINY, *OPTIONS, "--data.corpus", "pairs.jsonl", "--run", "a"]) == 0
    return folder


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_the_checkpoint_carries_the_template():
    assert load_with_template("runs/a")[2] == TEMPLATE


def test_evaluation_is_validation(capsys):
    """The checkpoint's template and the bytes of completions, in `gpt evaluate` as in validation."""
    data = TokenData("pairs.jsonl", vocab_size=300, context_length=32, template=TEMPLATE)
    assert main(["evaluate", "--checkpoint", "runs/a", "--data", "pairs.jsonl", "--split", "val"]) == 0
    found = json.loads(capsys.readouterr().out)
    counts = data.prepared.counts["val"]
    assert (found["tokens"], found["bytes"]) == (counts.scored_tokens, counts.scored_bytes)
    assert (
        main(
            ["validate", "--ckpt_path", "runs/a/checkpoints/best.safetensors", "--trainer.accelerator", "cpu"]
        )
        == 0
    )
    said = capsys.readouterr().out
    validated = json.loads(said[said.index("{") :])
    assert found["bits_per_byte"] == pytest.approx(validated["val_bits_per_byte"], rel=1e-5)


def test_a_resumed_run_and_a_further_one_keep_the_template(capsys):
    assert main(["fit", "--resume", "runs/a", "--trainer.max_steps", "21"]) == 0
    assert "changed data.template" not in capsys.readouterr().err
    options = ["--model.init_from", "runs/a", "--data.corpus", "pairs.jsonl", "--trainer.accelerator", "cpu"]
    options += ["--model.config.context_length", "32", "--trainer.logger", "csv"]
    assert main(["fit", "--config", "chat", *options, "--trainer.max_steps", "2", "--run", "further"]) == 0
    assert load_with_template("runs/further")[2] == TEMPLATE
    assert "next     gpt generate --checkpoint runs/further --interactive" in capsys.readouterr().out


@pytest.mark.slow
def test_small_weights_learn_the_rows_by_heart(capsys):
    """Rate, context and steps suit the weights, and no row is held out."""
    with open("pairs.jsonl", encoding="utf-8") as file, open("few.jsonl", "w", encoding="utf-8") as few:
        few.writelines([next(file) for _ in range(10)])
    options = ["--model.init_from", "runs/a", "--data.corpus", "few.jsonl", "--trainer.accelerator", "cpu"]
    options += ["--data.batch_size", "8", "--trainer.max_steps", "400"]
    assert main(["fit", "--config", "chat", *options, "--run", "heart"]) == 0
    model, tokenizer, template = load_with_template("runs/heart")
    assert template and model.config.context_length == 32
    right = 0
    for number in range(10):
        prompt = template.prompt(tokenizer, [{"role": "user", "content": f"Say {number}"}])
        ids = generate(model, torch.tensor([prompt]), max_new_tokens=12, temperature=0.0)[0].tolist()
        right += tokenizer.decode(ids[len(prompt) :]).startswith(f"{number} it is<|endoftext|>")
    assert right >= 9


@pytest.mark.slow
def test_weights_are_tuned_for_a_time(capsys):
    """They are scored as they are, and the run ends in time; a plan from scratch is not made."""
    options = ["--model.init_from", "runs/a", "--data.corpus", "pairs.jsonl", "--trainer.accelerator", "cpu"]
    began = time.perf_counter()
    assert main(["fit", *options, "--minutes", "12s", "--run", "timed"]) == 0
    assert time.perf_counter() - began < 15
    assert "the weights as they are: " in capsys.readouterr().err


def test_a_chat_in_the_terminal(capsys, monkeypatch):
    """Each reply is what follows the conversation so far, in the template, and only this is printed."""
    from gpt.generation import Sampling, stream_samples

    monkeypatch.setattr("sys.stdin", io.StringIO("Say 1\nSay <|endoftext|>\n"))
    options = ["--temperature", "0", "--max_new_tokens", "12", "--prompt", "Be kind"]
    assert main(["generate", "--checkpoint", "runs/a", "--interactive", *options]) == 0
    said = capsys.readouterr().out
    model, tokenizer, template = load_with_template("runs/a")
    messages, expected = [{"role": "system", "content": "Be kind"}], ""
    for text in ("Say 1", "Say <|endoftext|>"):
        messages.append({"role": "user", "content": text})
        ids = template.prompt(tokenizer, messages)
        pieces = stream_samples(model, tokenizer, ids, max_new_tokens=12, sampling=Sampling(temperature=0))
        reply = "".join(piece for _, piece in pieces)
        messages.append({"role": "assistant", "content": reply})
        expected += f"> {reply}\n"
    assert said == f"{expected}> \n"


def test_an_export_carries_the_template(tmp_path):
    """transformers gives the same text, and the template survives what it saves and an import of that."""
    transformers = pytest.importorskip("transformers")
    for form in ("hf", "gguf"):
        words = ["export", "--checkpoint", "runs/a", "--format", form, "--output", str(tmp_path / form)]
        assert main(words) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    _, tokenizer, template = load_with_template("runs/a")
    messages = [{"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant", "user")]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == tokenizer.decode(template.prompt(tokenizer, messages))
    with pytest.raises(Exception, match="unknown role"):
        theirs.apply_chat_template([{"role": "tool", "content": "x"}])
    theirs.save_pretrained(tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), "--output", str(tmp_path / "back")]) == 0
    for folder in ("hf", "back"):
        _, loaded, found = load_with_template(tmp_path / folder)
        assert (loaded, found) == (tokenizer, TEMPLATE)
    fields = pytest.importorskip("gguf").GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE.to_jinja()


LONG = [{"prompt": f"{i} " + "many words " * 60, "completion": f"{i} it is"} for i in range(64)]


def test_windows_that_are_too_short_are_told_of_and_train_on(folder, capsys):
    """64 prompts of hundreds of tokens in a window of 16: every loss is a number above 0."""
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LONG), encoding="utf-8")
    options = [*OPTIONS[:-1], "16", "--data.corpus", "long.jsonl", "--run", "short", "--log_every", "1"]
    assert main([*TINY, *options, "--trainer.max_steps", "10"]) == 0
    said = capsys.readouterr().err
    assert "examples longer than the context_length of 16 are cut, " in said
    assert (
        "give --model.config.context_length 1024" in said or "give --model.config.context_length 512" in said
    )
    rows = csv.DictReader(Path("runs/short/metrics.csv").read_text("utf-8").splitlines())
    losses = [float(row[name]) for row in rows for name in ("train_loss", "val_loss") if row[name]]
    assert len(losses) > 10
    assert all(0 < loss < 100 for loss in losses)


def test_positions_are_those_that_the_examples_need(folder, capsys):
    """As far as the weights have them, unless a number is given; 256 for shorter ones."""
    from gpt.run.start import start

    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LONG), encoding="utf-8")
    wide = [*OPTIONS[:-1], "2048", "--trainer.max_steps", "1", "--run", "wide", "--data.batch_size", "1"]
    (folder / "text.txt").write_text("some words of text\n" * 400, encoding="utf-8")
    assert main([*TINY, *wide, "--data.corpus", "text.txt"]) == 0
    begin = ["--config", "finetune", "--model.init_from", "runs/wide", "--data.corpus"]
    lengths = TokenData("long.jsonl", vocab_size=300, context_length=16).prepared.example_lengths()
    needed = 1 << (int(lengths.max()) - 1).bit_length()
    assert 256 < needed <= 1024
    for corpus, more, positions in (
        ("long.jsonl", [], needed),
        ("pairs.jsonl", [], 256),
        ("text.txt", [], 256),
        ("long.jsonl", ["--model.config.context_length", "64"], 64),
    ):
        assert start("fit", [*begin, corpus, *more]).options.model.config.context_length == positions
