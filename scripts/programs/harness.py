"""lm-evaluation-harness on a task of our own, so that nothing is downloaded."""

import json
import random
from typing import Any

import torch
from programs.common import Place

QUESTIONS = 12
TASK = """
task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{validation: "{file}"}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{ctx}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: label
target_delimiter: " "
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
WORDS = ("the", "cat", "sat", "on", "a", "mat", "saw", "one", "dog", "run", "to", "school", "with", "food")


def questions() -> list[dict[str, Any]]:
    """Contexts of several lengths with four endings each."""
    chance = random.Random(0)
    return [
        {
            "ctx": " ".join(chance.choices(WORDS, k=chance.randint(4, 40))),
            "endings": [" ".join(chance.choices(WORDS, k=chance.randint(1, 6))) for _ in range(4)],
            "label": chance.randrange(4),
        }
        for _ in range(QUESTIONS)
    ]


def run(place: Place, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The harness's results with the log-probabilities of every ending."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = place.folder / "task"
    folder.mkdir(exist_ok=True)
    file = folder / "endings.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in questions()), encoding="utf-8")
    (folder / "endings.yaml").write_text(TASK.format(file=file), encoding="utf-8")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found: dict[str, Any] = simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=["endings"],
        task_manager=manager,
        log_samples=True,
        device="cpu",
    )
    return found


def agree_with_ours(place: Place, found: dict[str, Any]) -> None:
    """Compare log-probabilities to 1e-4 with a forward pass, and accuracies with those that follow."""
    model, tokenizer, right = place.model, place.tokenizer, []
    for sample in found["samples"]["endings"]:
        endings, nats = sample["doc"]["endings"], []
        for ending, reply in zip(endings, sample["filtered_resps"], strict=True):
            before = tokenizer.encode(sample["doc"]["ctx"])
            ids = before + tokenizer.encode(" " + ending)
            with torch.no_grad():
                scores = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
            ours = sum(scores[i - 1, ids[i]].item() for i in range(len(before), len(ids)))
            if abs(ours - float(reply[0])) > 1e-4:
                raise AssertionError(f"{ending!r}: gpt gives {ours:.5f}, the harness {reply[0]}")
            nats.append(-ours)
        shares = [value / len(ending) for value, ending in zip(nats, endings, strict=True)]
        chosen = (nats.index(min(nats)), shares.index(min(shares)))
        right.append([one == sample["doc"]["label"] for one in chosen])
    theirs = found["results"]["endings"]
    for metric, ours in zip(("acc,none", "acc_norm,none"), zip(*right, strict=True), strict=True):
        if abs(theirs[metric] - sum(ours) / len(ours)) > 1e-4:
            raise AssertionError(f"{metric}: gpt gives {sum(ours) / len(ours)}, the harness {theirs[metric]}")
