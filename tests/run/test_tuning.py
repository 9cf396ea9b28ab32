"""From examples to a chat: one tiny run that the tests below use."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, gpt, summary

from gpt import generate
from gpt.cli import main
from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.generation import Sampling, stream_samples
from gpt.plan.rule import Machine
from gpt.run.fit import assemble
from gpt.run.lightning_private import silence_warnings
from gpt.run.start import start
from gpt.text.template import Template
from gpt.weights.load import load_with_template

TEMPLATE = Template(system="[{content}]", user="Q: {content}\n", assistant="A: {content}")
OPTIONS = [f"--data.template.{role}={getattr(TEMPLATE, role)}" for role in ("system", "user", "assistant")]
TUNE = "--model.init_from runs/a --data.corpus pairs.jsonl --trainer.accelerator cpu"


def write_rows(name: str, rows: list[dict[str, str]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def fit(options: str) -> int:
    return main([*TINY, *OPTIONS, *options.split()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    silence_warnings()
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_rows("pairs.jsonl", [{"prompt": f"Say {i}", "completion": f"{i} it is"} for i in range(200)])
        assert fit("--model.config.context_length 32 --data.corpus pairs.jsonl --run a") == 0
    return folder


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_evaluation_is_validation(capsys):
    """The checkpoint's template and the bytes of completions, in `gpt evaluate` as in validation."""
    data = TokenData("pairs.jsonl", vocab_size=300, context_length=32, template=TEMPLATE)
    counts = data.prepared.counts["val"]
    assert gpt("evaluate --checkpoint runs/a --data pairs.jsonl --split val") == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert (evaluated["tokens"], evaluated["bytes"]) == (counts.scored_tokens, counts.scored_bytes)
    assert gpt("validate runs/a --trainer.accelerator cpu") == 0
    validated = json.loads(capsys.readouterr().out)
    assert evaluated["bits_per_byte"] == pytest.approx(validated["val_bits_per_byte"], rel=1e-5)


def test_a_resumed_run_and_a_further_one_keep_the_template(capsys):
    assert gpt("fit --resume runs/a --trainer.max_steps 21") == 0
    assert "changed data.template" not in capsys.readouterr().err
    sizes = "--model.config.context_length 32 --trainer.max_steps 2"
    assert gpt(f"fit --config chat {TUNE} --trainer.logger csv {sizes} --run further") == 0
    assert load_with_template("runs/further")[2] == TEMPLATE
    assert "next     gpt generate --checkpoint runs/further --interactive" in capsys.readouterr().out


def test_a_template_that_is_given_comes_before_that_of_the_weights():
    usual = Template()
    options = [*f"{TUNE} --trainer.max_steps 1 --run own".split(), f"--data.template.user={usual.user}"]
    assert main(["fit", *options]) == 0
    assert load_with_template("runs/own")[2] == replace(TEMPLATE, user=usual.user)


@pytest.mark.slow
def test_small_weights_learn_the_rows_by_heart():
    """Rate, context and steps suit the weights, and no row is held out."""
    write_rows("few.jsonl", [{"prompt": f"Say {i}", "completion": f"{i} it is"} for i in range(10)])
    few = "--data.corpus few.jsonl --data.batch_size 8 --trainer.max_steps 400"
    assert gpt(f"fit --config chat {TUNE} {few} --run heart") == 0
    model, tokenizer, template = load_with_template("runs/heart")
    assert model.config.context_length == 32
    right = 0
    for number in range(10):
        prompt = template.prompt(tokenizer, [{"role": "user", "content": f"Say {number}"}])
        ids = generate(model, torch.tensor([prompt]), max_new_tokens=12, temperature=0.0)[0].tolist()
        right += tokenizer.decode(ids[len(prompt) :]).startswith(f"{number} it is<|endoftext|>")
    assert right >= 9


@pytest.mark.slow
def test_weights_are_tuned_for_a_time(capsys):
    """They are scored as they are, and the run ends in time; a plan from scratch is not made."""
    assert gpt(f"fit {TUNE} --minutes 12s --run timed") == 0
    assert summary("timed")["train_seconds"] < 12
    assert "the weights as they are: " in capsys.readouterr().err
    assert "early_stopping: 4\n" in Path("runs/timed/config.yaml").read_text("utf-8")


def test_a_tuning_for_a_time_stops_early_by_itself_only_where_text_is_held_out(monkeypatch):
    """The recipe for chats holds out no row."""
    monkeypatch.setattr("gpt.run.tuned.time_machine", lambda *_: Machine(speed=1e11, memory=16e9))

    def patience(options: str) -> int | None:
        return assemble(start("fit", f"{TUNE} --minutes 9 {options}".split())).options.early_stopping

    assert patience("--config finetune --data.val_fraction 0.1") == 4
    assert patience("--config chat") is None
    with pytest.raises(InputError, match="early_stopping needs held-out text"):
        patience("--config chat --early_stopping 4")


def test_a_chat_in_the_terminal(capsys, monkeypatch):
    """Each reply is what follows the conversation so far, in the template, and only this is printed."""
    monkeypatch.setattr("sys.stdin", io.StringIO("Say 1\nSay <|endoftext|>\n"))
    command = "generate --checkpoint runs/a --interactive --temperature 0 --max_new_tokens 12 --prompt Kind"
    assert gpt(command) == 0
    said = capsys.readouterr().out
    model, tokenizer, template = load_with_template("runs/a")
    messages, expected = [{"role": "system", "content": "Kind"}], ""
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
    for format in ("hf", "gguf"):
        assert gpt(f"export runs/a --format {format} --output {tmp_path / format}") == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    _, tokenizer, template = load_with_template("runs/a")
    messages = [{"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant", "user")]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == tokenizer.decode(template.prompt(tokenizer, messages))
    with pytest.raises(Exception, match="unknown role"):
        theirs.apply_chat_template([{"role": "tool", "content": "x"}])
    theirs.save_pretrained(tmp_path / "hf")
    assert gpt(f"import {tmp_path / 'hf'} --output {tmp_path / 'back'}") == 0
    assert load_with_template(tmp_path / "back")[1:] == (tokenizer, TEMPLATE)
    fields = pytest.importorskip("gguf").GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE.to_jinja()


def test_positions_are_those_that_the_examples_need():
    """As far as the weights have them, unless a number is given; 256 for shorter ones."""

    def positions(options: str) -> int:
        begun = start("fit", f"--config finetune --model.init_from runs/wide {options}".split())
        return begun.options.model.config.context_length

    Path("text.txt").write_text("some words of text\n" * 400, "utf-8")
    sizes = "--model.config.context_length 2048 --data.batch_size 1 --trainer.max_steps 1"
    assert fit(f"--data.corpus text.txt {sizes} --run wide") == 0
    prompt = "many words " * 60
    rows = [{"prompt": f"{number} {prompt}", "completion": f"{number} it is"} for number in range(64)]
    write_rows("long.jsonl", rows)
    lengths = TokenData("long.jsonl", vocab_size=300, context_length=16).prepared.example_lengths()
    needed = 1 << (int(lengths.max()) - 1).bit_length()
    assert 256 < needed <= 1024
    assert positions("--data.corpus long.jsonl") == needed
    assert positions("--data.corpus pairs.jsonl") == positions("--data.corpus text.txt") == 256
    assert positions("--data.corpus long.jsonl --model.config.context_length 64") == 64
