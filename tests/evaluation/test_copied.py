"""What stands word for word in the training text, against a search of all of it."""

import random

import numpy as np
import pytest

from gpt import Tokenizer
from gpt.errors import InputError
from gpt.evaluation.copied import Copied, training_text

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
    from gpt.run.fit import main

    corpus = "text.txt"
    if examples:
        corpus = "rows.jsonl"
        rows = [f'{{"prompt": "say {k}", "completion": "it is number {k}"}}\n' for k in range(50)]
        (workplace / corpus).write_text("".join(rows), encoding="utf-8")
    options = ["--trainer.max_steps", "1", "--model.config.emb_dim", "32", "--model.config.num_layers", "1"]
    options += ["--model.config.num_heads", "2"]
    main(["fit", "--data.corpus", corpus, "--run", "mine", *options])
    from gpt.weights.load import load

    _, tokenizer = load("runs/mine")
    ids = training_text(workplace / "runs" / "mine", tokenizer)
    text = tokenizer.decode(ids.tolist())
    assert ("### Instruction:\nsay " in text and "it is number 7" in text) if examples else len(text) > 1000
    (workplace / corpus).unlink()
    with pytest.raises(InputError, match="not at hand: .*" + corpus):
        training_text(workplace / "runs" / "mine", tokenizer)
    with pytest.raises(InputError, match="not known"):
        training_text(None, tokenizer)
