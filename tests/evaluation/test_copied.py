"""Passages copied verbatim from the training text, compared with a search of all of it."""

import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from tiny_runs import TEXT, fit, gpt

from gpt import Tokenizer
from gpt.data.prepare import prepare
from gpt.data.prepared import Prepared
from gpt.errors import InputError
from gpt.evaluation.copied import Copied, training_text
from gpt.weights.load import load

TOKENIZER = Tokenizer(vocab_size=257)


def by_a_search(ids: list[int], text: list[int], least: int) -> list[list[int]]:
    """The passages that stand in the text as a whole, without those inside another one."""

    def is_copied(start: int, end: int) -> bool:
        passage = ids[start:end]
        return any(passage == text[place : place + end - start] for place in range(len(text)))

    ends = range(len(ids) + 1)
    copied = [(start, end) for end in ends for start in range(end - least + 1) if is_copied(start, end)]
    return [
        [start, end]
        for start, end in sorted(copied)
        if (start - 1, end) not in copied and (start, end + 1) not in copied
    ]


@pytest.mark.parametrize("least", [2, 12])
@pytest.mark.parametrize("alphabet", [3, 100])
def test_the_runs_are_those_of_a_search(least, alphabet):
    drawn = random.Random(least * alphabet)
    text = [drawn.randrange(alphabet) for _ in range(150)]
    copied = Copied(np.array(text, np.uint16), TOKENIZER, least)
    lengths = set()
    for _ in range(8):
        ids: list[int] = []
        while len(ids) < 40:  # passages and what is between them
            start = drawn.randrange(150)
            ids += text[start : start + drawn.randrange(20)]
            ids += [drawn.randrange(alphabet) for _ in range(drawn.randrange(4))]
        runs = copied.runs(ids)
        assert runs == by_a_search(ids, text, least)
        lengths |= {end - start for start, end in runs}
    assert len(lengths) > 3


def test_no_run_is_joined_from_two_places_of_the_text():
    text = np.array([*range(12), 99, *range(1, 13)], np.uint16)
    copied = Copied(text, TOKENIZER)
    assert copied.runs(range(13)) == [[0, 12], [1, 13]]
    line = copied.mark(TOKENIZER.decode(range(13))).splitlines()[-1]
    assert line == "13 of 13 tokens are copied, the longest run 12"


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


def trained_on(corpus: str) -> tuple[Path, Tokenizer, list[int]]:
    """A run, its tokenizer and the ids of its text."""
    assert fit(f"--trainer.max_steps 1 --run mine --data.corpus {corpus}") == 0
    folder = Path("runs/mine").absolute()
    tokenizer = load(folder)[1]
    return folder, tokenizer, training_text(folder, tokenizer).tolist()


def test_the_text_of_examples_is_their_prompts_and_completions(workplace):
    rows = [f'{{"prompt": "say {k}", "completion": "it is number {k}"}}\n' for k in range(50)]
    (workplace / "rows.jsonl").write_text("".join(rows), "utf-8")
    _, tokenizer, ids = trained_on("rows.jsonl")
    text = tokenizer.decode(ids)
    assert "### Instruction:\nsay " in text and "it is number 7" in text


@pytest.fixture
def run(workplace, monkeypatch) -> tuple[Path, Tokenizer, list[int]]:
    """A run whose prepared text the cache holds no more."""
    monkeypatch.setenv("GPT_CACHE", str(workplace / "cache"))
    result = trained_on("text.txt")
    shutil.rmtree(workplace / "cache")
    return result


def name_corpus(run: Path, corpus: str) -> None:
    """What its config.yaml says that it was trained on."""
    options = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    options["data"]["corpus"] = corpus
    (run / "config.yaml").write_text(yaml.safe_dump(options, sort_keys=False), "utf-8")


def test_nothing_that_a_strangers_run_names_is_read(run, workplace, monkeypatch, capsys):
    folder, tokenizer, _ = run
    (workplace / "private.txt").write_text("my secret", "utf-8")
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
    text = tokenizer.decode(ids).replace("<|endoftext|>", "")
    assert len(text) > 1000 and text in TEXT
    name_corpus(folder, "http://127.0.0.1:9/x.txt")
    assert gpt("validate runs/mine --data.corpus text.txt") == 0
    (workplace / "text.txt").unlink()
    assert training_text(folder, tokenizer).tolist() == ids


def test_a_prepared_text_that_was_overwritten_is_refused(workplace):
    folder, tokenizer, ids = trained_on("text.txt")
    prepared = Prepared(prepare("text.txt", "prepared", vocab_size=tokenizer.n_vocab))
    assert len(prepared.stream("train")) == len(ids)
    name_corpus(folder, "prepared")
    prepared.stream("train").path.write_bytes(b"\xff\xff" * len(ids))
    with pytest.raises(InputError, match="has the token 65535, its vocabulary only"):
        training_text(folder, tokenizer)


def test_a_prepared_folder_that_a_run_names_counts_by_its_hash(run):
    folder, tokenizer, ids = run
    prepare("text.txt", "tokens", vocab_size=300)
    name_corpus(folder, "tokens")
    assert training_text(folder, tokenizer).tolist() == ids
    with pytest.raises(InputError, match="not at hand"):
        training_text(folder, Tokenizer(vocab_size=290))
