"""Labels as completions, scored by likelihood, against one forward pass for each choice."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpt import GPT, Tokenizer
from gpt.cli import main
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.errors import InputError
from gpt.evaluation.choices import log_probabilities, read_examples, score_choices
from gpt.text.template import DEFAULT_TEMPLATE, Template

TOKENIZER = Tokenizer("gpt2", vocab_size=300)
LABELS = ["bad", "odd", "sad"]
ROWS = [(f"film {number}" + chr(97 + number) * number, LABELS[number % 5 % 3]) for number in range(12)]


@pytest.fixture
def model(config):
    model = GPT(replace(config, context_length=96)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.normal_(model.position_embedding.weight, std=3.0)  # the length of a prompt matters
    return model


@pytest.fixture
def corpus(tmp_path):
    def write(rows=ROWS, columns=("prompt", "completion")):
        lines = [json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows]
        (tmp_path / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
        return str(tmp_path / "rows.jsonl")

    return write


def prompt_of(text, template=DEFAULT_TEMPLATE):
    """The ids that generation would read."""
    return template.prompt(TOKENIZER, [{"role": "user", "content": text}])


@torch.no_grad()
def log_probability(model, prompt, label):
    """The loss of the label and its end after the prompt, by one forward pass."""
    ids = [*prompt, *TOKENIZER.encode(label), TOKENIZER.eot]
    scores = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    return sum(scores[place - 1, ids[place]].item() for place in range(len(prompt), len(ids)))


def test_each_choice_as_in_one_forward_pass(model, corpus):
    prepared = Prepared(prepare(corpus(), vocab_size=300, val_fraction=0))
    expected = [[log_probability(model, prompt_of(text), label) for label in LABELS] for text, _ in ROWS]
    choices = [(*TOKENIZER.encode(label), TOKENIZER.eot) for label in LABELS]
    prompts = [example.prompt for example in read_examples(prepared, "train")]
    assert log_probabilities(model, prompts, choices) == pytest.approx(np.array(expected), abs=1e-3)
    answers = [LABELS[row.index(max(row))] for row in expected]
    assert len(set(answers)) > 1  # the model's answer depends on the prompt
    found = score_choices(model, prepared, "train")
    right = [label == answer for (_, label), answer in zip(ROWS, answers, strict=True)]
    assert found["accuracy"] == sum(right) / 12
    assert found["accuracy_of_the_most_frequent_label"] == 5 / 12
    assert found["labels"] == {
        label: {
            "examples": [given for _, given in ROWS].count(label),
            "predicted": answers.count(label),
            "right": sum(hit for (_, given), hit in zip(ROWS, right, strict=True) if given == label),
        }
        for label in LABELS
    }


def test_a_uniform_model_takes_the_label_with_the_fewest_tokens(model, corpus):
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    choices = [(*TOKENIZER.encode(label), TOKENIZER.eot) for label in ("yes", "a")]
    found = log_probabilities(model, [tuple(prompt_of("Well?"))], choices)
    assert found[0] == pytest.approx([-len(choice) * math.log(300) for choice in choices])
    prepared = Prepared(prepare(corpus([("a", "yes"), ("b", "a")]), vocab_size=300, val_fraction=0))
    assert score_choices(model, prepared, "train")["labels"]["a"]["predicted"] == 2


def test_a_long_prompt_loses_its_beginning(model, capsys):
    prompt = tuple(prompt_of("long " * 60))
    choices = [(*TOKENIZER.encode(label), TOKENIZER.eot) for label in LABELS]
    longest = 97 - max(map(len, choices))
    expected = [log_probability(model, prompt[-longest:], label) for label in LABELS]
    assert log_probabilities(model, [prompt], choices)[0] == pytest.approx(expected, abs=1e-3)
    assert f"prompts longer than {longest} tokens lose their beginning, 1 of 1" in capsys.readouterr().err


def test_the_command_scores_a_held_out_part_among_all_labels(model, corpus, tmp_path, capsys):
    template = Template(user="Q {content}\n", assistant="A {content}")
    model.save_pretrained(tmp_path / "model")
    path = corpus(ROWS * 5, ("title", "mood"))
    options = ["--data", path, "--text_column", "title,mood", "--split", "val", "--val_fraction", "0.2"]
    assert main(["evaluate", "--checkpoint", str(tmp_path / "model"), "--choices", *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    prepared = Prepared(prepare(path, vocab_size=300, val_fraction=0.2, text_column="title,mood"))
    assert printed == {"data": path, "split": "val"} | score_choices(model, prepared, "val")
    assert printed["examples"] == prepared.counts["val"].documents
    assert set(printed["labels"]) == set(LABELS)
    own = Prepared(prepare(path, vocab_size=300, text_column="title,mood", template=template))
    first = next(read_examples(own, "train"))
    assert TOKENIZER.decode(list(first.prompt[1:])).startswith("Q film")
    assert first.prompt in {tuple(prompt_of(text, template)) for text, _ in ROWS}


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([("a", "yes"), ("b", "yes")], ("prompt", "completion"), "2 to 1,000 different labels .* got 1"),
        ([("a", "b")], ("text", "note"), "expected examples with a prompt and a label"),
        ([("a", "no"), ("b", "long " * 60)], ("prompt", "completion"), "label is longer than .* 96 tokens"),
    ],
)
def test_bad_input(rows, columns, message, model, corpus):
    prepared = Prepared(prepare(corpus(rows, columns), vocab_size=300, val_fraction=0))
    with pytest.raises(InputError, match=message):
        score_choices(model, prepared, "train")
    with pytest.raises(InputError, match=r"has no examples|got plain text"):
        score_choices(model, prepared, "val")
