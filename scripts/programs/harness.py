"""lm-evaluation-harness on a task of our own, so that nothing is downloaded."""

import json
import random
from typing import Any

import torch
from programs.common import Place

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
metric_list: [{{metric: acc}}]
"""
WORDS = "the cat sat on a mat saw one dog run to school with food"


def questions() -> list[dict[str, Any]]:
    """Contexts of several lengths with four endings each."""
    chance, words = random.Random(0), WORDS.split(" ")
    found = []
    for number in range(12):
        context = " ".join(chance.choices(words, k=chance.randint(4, 40)))
        endings = [" ".join(chance.choices(words, k=chance.randint(1, 6))) for _ in range(4)]
        found.append({"ctx": context, "endings": endings, "label": number % 4})
    return found


def compare_with_harness(place: Place, kind: str, arguments: dict[str, Any]) -> None:
    """The harness's log-probability of every ending, with that of a forward pass, to 1e-4."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = place.folder / "task"
    folder.mkdir(exist_ok=True)
    file = folder / "endings.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in questions()), encoding="utf-8")
    (folder / "endings.yaml").write_text(TASK.format(file=file), encoding="utf-8")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    how: dict[str, Any] = {"tasks": ["endings"], "task_manager": manager, "log_samples": True}
    found = simple_evaluate(model=kind, model_args=arguments, device="cpu", **how)
    model, encode = place.model, place.tokenizer.encode
    for sample in found["samples"]["endings"]:
        before = encode(sample["doc"]["ctx"])
        for ending, reply in zip(sample["doc"]["endings"], sample["filtered_resps"], strict=True):
            ids = before + encode(" " + ending)
            with torch.no_grad():
                scores = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
            ours = sum(scores[place - 1, ids[place]].item() for place in range(len(before), len(ids)))
            if abs(ours - float(reply[0])) > 1e-4:
                raise AssertionError(f"{ending!r}: gpt gives {ours:.5f}, the harness {reply[0]}")
