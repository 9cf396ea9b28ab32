"""lm-evaluation-harness on tasks of our own, so that nothing is downloaded."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from programs.common import Place

ENDINGS = """
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
DOCUMENTS = """
task: documents
dataset_path: json
dataset_kwargs: {{data_files: {{validation: "{file}"}}}}
validation_split: validation
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
ANSWERS = """
task: answers
dataset_path: json
dataset_kwargs: {{data_files: {{validation: "{file}"}}}}
validation_split: validation
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], do_sample: false, temperature: 0, max_gen_toks: 60}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
WORDS = "the cat sat on a mat saw one dog run to school with food"


def questions() -> list[dict[str, Any]]:
    """Contexts of several lengths with four endings each."""
    chance, words = random.Random(0), WORDS.split(" ")
    rows = []
    for number in range(12):
        context = " ".join(chance.choices(words, k=chance.randint(4, 40)))
        endings = [" ".join(chance.choices(words, k=chance.randint(1, 6))) for _ in range(4)]
        rows.append({"ctx": context, "endings": endings, "label": number % 4})
    return rows


def documents() -> list[dict[str, Any]]:
    """Documents of one word to some hundred, which is several contexts of the model."""
    chance, words = random.Random(1), WORDS.split(" ")
    return [{"page": " ".join(chance.choices(words, k=count))} for count in (1, 3, 60, 200, 500)]


class HarnessTasks:
    """The tasks in the place's folder."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.folder: Path = place.folder / "tasks"
        self.folder.mkdir(exist_ok=True)

    def run(
        self,
        kind: str,
        arguments: dict[str, Any],
        task: str,
        form: str,
        rows: list[dict[str, Any]],
        **how: Any,
    ) -> dict[str, Any]:
        """The harness's results on a task, whose definition has the given form."""
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        file = self.folder / f"{task}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (self.folder / f"{task}.yaml").write_text(form.format(file=file), encoding="utf-8")
        manager = TaskManager(include_path=str(self.folder), include_defaults=False)
        how |= {"tasks": [task], "task_manager": manager, "log_samples": True, "device": "cpu"}
        return simple_evaluate(model=kind, model_args=arguments, **how)

    def compare_endings(self, kind: str, arguments: dict[str, Any]) -> None:
        """The harness's log-probability of every ending, with that of a forward pass, to 1e-4."""
        results = self.run(kind, arguments, "endings", ENDINGS, questions())
        encode = self.place.tokenizer.encode
        for sample in results["samples"]["endings"]:
            before = encode(sample["doc"]["ctx"])
            for ending, reply in zip(sample["doc"]["endings"], sample["filtered_resps"], strict=True):
                self._check(ending, self._score(before, encode(" " + ending)), float(reply[0]))

    def compare_documents(self, kind: str, arguments: dict[str, Any]) -> None:
        """The harness's log-probability of whole documents, with that of forward passes over its windows."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        results = self.run(kind, arguments, "documents", DOCUMENTS, documents())
        tokenizer = self.place.tokenizer
        for sample in results["samples"]["documents"]:
            page = sample["doc"]["page"]
            # The harness keeps one position free for its first token and one for a new token.
            length = arguments["max_length"] - 2
            windows = get_rolling_token_windows(tokenizer.encode(page), tokenizer.eot, length, 1)
            ours = sum(self._score(*make_disjoint_window(window)) for window in windows)
            self._check(page, ours, float(sample["filtered_resps"][0]))

    def share_of_answers(self, kind: str, arguments: dict[str, Any], answers: dict[str, str]) -> float:
        """The share of questions that a chat answers exactly."""
        rows = [{"question": question, "answer": answer} for question, answer in answers.items()]
        results = self.run(kind, arguments, "answers", ANSWERS, rows, apply_chat_template=True)
        return results["results"]["answers"]["exact_match,none"]

    def _score(self, before: list[int], after: list[int]) -> float:
        ids = [*before, *after]
        with torch.no_grad():
            scores = self.place.model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
        return sum(scores[position - 1, ids[position]].item() for position in range(len(before), len(ids)))

    def _check(self, text: str, ours: float, theirs: float) -> None:
        if abs(ours - theirs) > max(1e-4, 1e-6 * abs(ours)):
            raise AssertionError(f"{text[:60]!r}: gpt gives {ours:.5f}, the harness {theirs}")
