"""Labels as completions, scored by likelihood, against one forward pass for each choice."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpt import Tokenizer
from gpt.cli import main
from gpt.data.prepare import prepare
from gpt.data.prepared import Prepared
from gpt.errors import InputError
from gpt.evaluation.choices import log_probabilities, read_examples, score_choices
from gpt.text.template import DEFAULT_TEMPLATE
from tests.generation.conftest import sharp

TOKENIZER = Tokenizer("gpt2", vocab_size=300)
LABELS = ["bad", "odd", "sad"]
ROWS = [(f"film {number}" + chr(97 + number) * number, LABELS[number % 5 % 3]) for number in range(12)]


@pytest.fixture
def model(config):
    model = sharp(replace(config, context_length=96))
    torch.nn.init.normal_(model.position_embedding.weight, std=3.0)  # the length of a prompt matters
    return model


@pytest.fixture
def prepared_of(tmp_path):
    """Prepares examples, or other columns."""

    def prepare_rows(rows, columns=("prompt", "completion"), **options) -> Prepared:
        lines = [json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows]
        (tmp_path / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
        return Prepared(prepare(str(tmp_path / "rows.jsonl"), vocab_size=300, **options))

    return prepare_rows


def prompt_of(text):
    """The ids that generation would read."""
    return DEFAULT_TEMPLATE.prompt(TOKENIZER, [{"role": "user", "content": text}])


@torch.no_grad()
def log_probability(model, prompt, label):
    """The loss of the label and its end after the prompt, by one forward pass."""
    ids = [*prompt, *TOKENIZER.encode(label), TOKENIZER.eot]
    scores = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    return sum(scores[place - 1, ids[place]].item() for place in range(len(prompt), len(ids)))


def choices_of(labels):
    return [(*TOKENIZER.encode(label), TOKENIZER.eot) for label in labels]


def test_each_choice_as_in_one_forward_pass(model, prepared_of):
    prepared = prepared_of(ROWS, val_fraction=0)
    choices = [*LABELS, "of more tokens"]
    expected = [[log_probability(model, prompt_of(text), label) for label in choices] for text, _ in ROWS]
    prompts = [example.prompt for example in read_examples(prepared, "train")]
    scores = log_probabilities(model, prompts, choices_of(choices))
    assert scores == pytest.approx(np.array(expected), abs=1e-3)
    answers = [LABELS[row.index(max(row[:3]))] for row in expected]
    assert len(set(answers)) > 1  # the model's answer depends on the prompt
    pairs = [(given, answer) for (_, given), answer in zip(ROWS, answers, strict=True)]
    result = score_choices(model, prepared, "train")
    assert result["accuracy"] == sum(given == answer for given, answer in pairs) / 12
    assert result["accuracy_of_the_most_frequent_label"] == 5 / 12
    assert result["labels"] == {
        label: {
            "examples": [given for given, _ in pairs].count(label),
            "predicted": answers.count(label),
            "right": pairs.count((label, label)),
        }
        for label in LABELS
    }


def test_a_long_prompt_loses_its_beginning(model, capsys):
    prompt = tuple(prompt_of("long " * 60))
    choices = choices_of(LABELS)
    longest = 97 - max(map(len, choices))
    expected = [log_probability(model, prompt[-longest:], label) for label in LABELS]
    assert log_probabilities(model, [prompt], choices)[0] == pytest.approx(expected, abs=1e-3)
    assert f"prompts longer than {longest} tokens lose their beginning, 1 of 1" in capsys.readouterr().err


def test_the_command_scores_a_held_out_part_among_all_labels(model, prepared_of, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    prepared = prepared_of(ROWS * 5, ("title", "mood"), val_fraction=0.2, text_column="title,mood")
    data = str(tmp_path / "rows.jsonl")
    options = ["--data", data, "--text_column", "title,mood", "--split", "val", "--val_fraction", "0.2"]
    assert main(["evaluate", "--checkpoint", str(tmp_path / "model"), "--choices", *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"data": data, "split": "val"} | score_choices(model, prepared, "val")
    assert printed["examples"] == prepared.counts["val"].documents
    assert set(printed["labels"]) == set(LABELS)


def test_the_label_is_the_last_reply_that_is_scored(prepared_of):
    """A reply of weight 0 behind it is no label, and no part of one."""
    replies = [("yes", 1), ("no", 1), ("perhaps", 0)]
    chat = [
        {"role": role, "content": text, "weight": weight}
        for number, (reply, weight) in enumerate(replies)
        for role, text, weight in (("user", f"{number}?", 1), ("assistant", reply, weight))
    ]
    (example,) = read_examples(prepared_of([(chat,)], ("messages",), val_fraction=0), "train")
    assert example.prompt == tuple(DEFAULT_TEMPLATE.prompt(TOKENIZER, chat[:3]))
    assert example.label == (*TOKENIZER.encode("no"), TOKENIZER.eot)


def test_an_example_without_a_label_is_one_line(model, prepared_of):
    """Preparing leaves such an example out, but a stranger's folder may have it."""
    prepared = prepared_of(ROWS, val_fraction=0)
    stream = prepared.stream("train")
    stored = stream.tokens.copy()
    first, second = stream.example_starts[:2]
    stored[first:second] = np.minimum(stored[first:second], ~stored[first:second])
    stored.tofile(stream.path)
    with pytest.raises(InputError, match="an example of the split train has no label: nothing of it is sc"):
        score_choices(model, prepared, "train")


BAD = {
    "one label": ([("a", "yes"), ("b", "yes")], "prompt", "2 to 1,000 different labels .* got 1"),
    "plain text": ([("a", "b")], "text", "expected examples with a prompt and a label"),
    "a long label": ([("a", "no"), ("b", "long " * 60)], "prompt", "label is longer than .* 96 tokens"),
}


@pytest.mark.parametrize(("rows", "first", "message"), BAD.values(), ids=BAD)
def test_bad_input(rows, first, message, model, prepared_of):
    prepared = prepared_of(rows, (first, "completion"), val_fraction=0)
    with pytest.raises(InputError, match=message):
        score_choices(model, prepared, "train")
    with pytest.raises(InputError, match=r"has no examples|got plain text"):
        score_choices(model, prepared, "val")
