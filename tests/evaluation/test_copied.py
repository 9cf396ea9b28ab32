"""Passages copied verbatim from the training text, compared with a search of all of it."""

import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from tiny_runs import fit

from gpt import Tokenizer
from gpt.cli import main
from gpt.data.prepare import prepare
from gpt.errors import InputError
from gpt.evaluation.copied import Copied, training_text
from gpt.weights.load import load

TOKENIZER = Tokenizer(vocab_size=257)


@pytest.mark.parametrize("least", [2, 3, 12])
@pytest.mark.parametrize("alphabet", [3, 100])
def test_the_runs_are_those_of_a_search(least, alphabet):
    """Each is as long as it can be while every `least` of its ids in a row stand in the text."""
    drawn = random.Random(least * alphabet)
    text = [drawn.randrange(alphabet) for _ in range(150)]
    grams = [text[place : place + least] for place in range(150 - least + 1)]
    lengths = set()
    for _ in range(8):
        ids: list[int] = []
        while len(ids) < 40:  # passages and what is between them
            start = drawn.randrange(150)
            ids += text[start : start + drawn.randrange(20)]
            ids += [drawn.randrange(alphabet) for _ in range(drawn.randrange(4))]
        expected, before = [], False
        for start in range(len(ids) - least + 1):
            if known := ids[start : start + least] in grams:
                expected += [] if before else [[start, 0]]
                expected[-1][1] = start + least
            before = known
        found = Copied(np.array(text, np.uint16), TOKENIZER, least).runs(ids)
        assert found == expected
        lengths |= {end - start for start, end in found}
    assert len(lengths) > 3


def test_texts_shorter_than_a_run():
    for text, ids in (([], [1, 2, 3]), ([1, 2, 3], []), ([1, 2], [1, 2, 3])):
        assert Copied(np.array(text, np.uint16), TOKENIZER, 3).runs(ids) == []
    with pytest.raises(InputError, match="copied_tokens must be at least 2"):
        Copied(np.array([1, 2], np.uint16), TOKENIZER, 1)


def test_marks_stand_between_characters_and_the_line_counts_tokens():
    text = TOKENIZER.encode("to be or not to be 漢字 that is")
    copied = Copied(np.array(text, np.uint16), TOKENIZER, 6)
    text = "He said: or not to be 漢 and that is"
    marked = "He said:[[ or not to be 漢]] and[[ that is]]"
    line = f"{17 + 8} of {len(text.encode())} tokens are copied, the longest run 17"
    assert copied.mark(text) == f"{marked}\n{line}"
    # A run that ends within a character is marked before it; runs that overlap are marked together.
    assert copied.mark("not to be 满").startswith("[[not to be ]]满")
    assert copied.mark("to be or not to be that is") == (
        "[[to be or not to be that is]]\n26 of 26 tokens are copied, the longest run 19"
    )
    assert copied.mark("something") == "something\n0 of 9 tokens are copied, the longest run 0"


@pytest.mark.parametrize("examples", [False, True])
def test_the_text_of_a_run_is_what_it_was_trained_on(workplace, examples):
    corpus = "text.txt"
    if examples:
        corpus = "rows.jsonl"
        rows = [f'{{"prompt": "say {k}", "completion": "it is number {k}"}}\n' for k in range(50)]
        (workplace / corpus).write_text("".join(rows), encoding="utf-8")
    options = ["--trainer.max_steps", "1", "--model.config.emb_dim", "32", "--model.config.num_layers", "1"]
    options += ["--model.config.num_heads", "2"]
    assert main(["fit", "--data.corpus", corpus, "--run", "mine", *options]) == 0
    _, tokenizer = load("runs/mine")
    ids = training_text(workplace / "runs" / "mine", tokenizer)
    text = tokenizer.decode(ids.tolist())
    assert ("### Instruction:\nsay " in text and "it is number 7" in text) if examples else len(text) > 1000
    with pytest.raises(InputError, match="not known"):
        training_text(None, tokenizer)


@pytest.fixture
def run(workplace, monkeypatch) -> tuple[Path, Tokenizer, list[int]]:
    """A run, its tokenizer and the ids of its text, which the cache of a test of its own holds no more."""
    monkeypatch.setenv("GPT_CACHE", str(workplace / "cache"))
    assert fit("--trainer.max_steps", "1", "--run", "mine") == 0
    folder = workplace / "runs" / "mine"
    tokenizer = load(folder)[1]
    ids = training_text(folder, tokenizer).tolist()
    shutil.rmtree(workplace / "cache")
    return folder, tokenizer, ids


def name_corpus(run: Path, corpus: str) -> None:
    """What its config.yaml says that it was trained on."""
    options = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    options["data"]["corpus"] = corpus
    (run / "config.yaml").write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")


def test_nothing_that_a_strangers_run_names_is_read(run, workplace, monkeypatch, capsys):
    folder, tokenizer, _ = run
    (workplace / "private.txt").write_text("my secret", encoding="utf-8")
    prepare("private.txt", "prepared", vocab_size=300)
    opened, watching = [], True

    def watch(event: str, args: tuple) -> None:
        if watching and event == "open":
            opened.append(str(args[0]))

    sys.addaudithook(watch)
    for corpus in ("text.txt", "private.txt", "prepared", "http://127.0.0.1:9/x.txt", "hf://a/b", "a/b"):
        name_corpus(folder, corpus)
        with pytest.raises(InputError, match=f"not at hand: .*validate --ckpt_path {folder}"):
            training_text(folder, tokenizer)
    watching = False
    assert not any(name.endswith(("text.txt", "private.txt", ".bin")) for name in opened)
    assert not (workplace / "cache").exists() and capsys.readouterr().err.count("downloading") == 0


def test_the_text_of_a_run_is_at_hand_once_it_is_prepared_again(run, workplace):
    folder, tokenizer, ids = run
    name_corpus(folder, "http://127.0.0.1:9/x.txt")
    assert main(["validate", "--ckpt_path", str(folder), "--data.corpus", "text.txt"]) == 0
    (workplace / "text.txt").unlink()
    assert training_text(folder, tokenizer).tolist() == ids


def test_a_prepared_folder_that_a_run_names_counts_by_its_hash(run):
    folder, tokenizer, ids = run
    prepare("text.txt", "tokens", vocab_size=300)
    name_corpus(folder, "tokens")
    assert training_text(folder, tokenizer).tolist() == ids
    with pytest.raises(InputError, match="not at hand"):
        training_text(folder, Tokenizer(vocab_size=290))
