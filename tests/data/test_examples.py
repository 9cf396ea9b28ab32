"""Examples: which of their tokens are stored as scored, and in which windows and batches they stand."""

from itertools import islice

import pytest
import torch
from corpora import joined, write_rows

from gpt.cli import main
from gpt.data.module import TokenData
from gpt.data.prepare import prepare
from gpt.data.prepared import Prepared
from gpt.data.windows import IGNORE_INDEX
from gpt.errors import InputError
from gpt.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer("gpt2", vocab_size=300)
EOT = TOKENIZER.eot
PAIRS = [(f"What is {i} of caf\u00e9?", f"{i * i} <|endoftext|>!" + " more" * (i % 4)) for i in range(60)]
PAIR_ROWS = [{"prompt": prompt, "completion": completion, "note": "n"} for prompt, completion in PAIRS]


def messages_of(pair) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]


@pytest.fixture
def pairs(tmp_path) -> str:
    return str(write_rows(tmp_path / "pairs.jsonl", PAIR_ROWS))


def data_of(corpus, **options) -> TokenData:
    defaults = {"vocab_size": 300, "context_length": 128, "batch_size": 4, "val_fraction": 0.2}
    return TokenData(str(corpus), **defaults | options)


def stored(*parts: tuple[str, bool]) -> list[int]:
    """An example by the definition: ids of completions and their ends, -1 - id for all else."""
    ids: list[int] = []
    for text, scored in parts:
        encoded = TOKENIZER.encode(text)
        ids += [*encoded, EOT] if scored else [-1 - id_ for id_ in encoded]
    return ids


STORED_PAIRS = [
    stored((f"### Instruction:\n{prompt}\n\n### Response:\n", False), (completion, True))
    for prompt, completion in PAIRS
]


def scored_tokens(batch) -> int:
    return int((batch[1] != IGNORE_INDEX).sum())


def test_weights_of_the_batches_of_an_update(pairs):
    """2 processes have 3 batches of 4 windows each, across the end of an epoch."""
    batches = []
    for rank in (0, 1):
        loader = joined(data_of(pairs), rank, processes=2, batches=3).train_dataloader()
        loader.load_state_dict({"windows": 8 * 5})
        assert len(loader) * 8 > loader.dataset.windows.count
        batches.append(list(islice(loader, 6)))
    for update in (slice(0, 3), slice(3, 6)):
        ours = [batch for process in batches for batch in process[update]]
        scored = torch.tensor([scored_tokens(batch) for batch in ours])
        assert len(set(scored.tolist())) > 1
        weights = torch.stack([batch.weight for batch in ours])
        torch.testing.assert_close(weights, scored / scored.double().mean(), check_dtype=False)


TEMPLATE = "--template.system <{content}> --template.user U:{content}; --template.assistant A:{content}"


def test_a_conversation_with_a_template_of_its_own(tmp_path):
    system = {"role": "system", "content": "Be kind"}
    chat = [system, *messages_of(("Hi", "Hello")), *messages_of(("So?", "So."))]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": chat}])
    options = f"--output {tmp_path}/out --vocab_size 300 --val_fraction 0"
    assert main(f"prepare {path} {options} {TEMPLATE}".split()) == 0
    prepared = Prepared(tmp_path / "out")
    tokens = prepared.stream("train").tokens
    parts = (("<Be kind>U:Hi;A:", False), ("Hello", True), ("U:So?;A:", False), ("So.", True))
    assert tokens.tolist() == stored(*parts)
    assert tokens.dtype == "<i4"
    assert prepared.template == {"system": "<{content}>", "user": "U:{content};", "assistant": "A:{content}"}
    assert prepared.counts["train"].scored_tokens == (tokens >= 0).sum()
    assert prepared.counts["train"].scored_bytes == len("HelloSo.")


def windows_examples(batches) -> list[list[int]]:
    """The examples in the windows of batches, as they are stored."""
    found = []
    for x, y in batches:
        for window in torch.where(y == IGNORE_INDEX, ~x.roll(-1), y).tolist():
            while EOT in window:
                end = window.index(EOT) + 1
                found.append(window[:end])
                window = window[end:]
    return found


def test_every_completion_is_a_target_once_behind_its_whole_prompt(pairs):
    data = data_of(pairs)
    val = windows_examples(data.val_dataloader())
    train = windows_examples(data.train_dataloader())
    assert len(val) == data.prepared.counts["val"].documents
    once = {tuple(example) for example in train}  # the last batch has windows of the next epoch
    assert sorted([*val, *map(list, once)]) == sorted(STORED_PAIRS)


def test_what_is_left_out_and_what_is_cut(tmp_path, capsys):
    """No batch has a loss of no tokens; an example without a completion is none."""
    prompts = ["long " * (40 if number % 5 == 0 else 1) + str(number) for number in range(40)]
    rows = [{"prompt": prompt, "completion": "yes"} for prompt in prompts]
    rows += [{"prompt": "Hi", "completion": text} for text in ("", "  ", None)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    data = data_of(path, context_length=64, batch_size=1, val_fraction=0)
    scored = [scored_tokens(batch) for batch in data.train_dataloader()]
    assert min(scored) > 0
    assert sum(scored) == data.prepared.counts["train"].scored_tokens
    told = capsys.readouterr().err
    assert "examples longer than the context_length of 64 are cut, 8 of 40, so their" in told
    assert "give --model.config.context_length 256" in told


def test_isolate_keeps_a_conversation_together_with_all_its_turns(tmp_path):
    (begin,) = TOKENIZER.encode("~")
    turns = [messages_of((f"{number}?", f"{number}!")) * 2 for number in range(60)]
    rows = [{"messages": [{"role": "system", "content": "~"}, *messages]} for messages in turns]
    data = data_of(write_rows(tmp_path / "a.jsonl", rows), isolate=True, context_length=512)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        x, y, documents = next(iter(loader))
        expected = (x.roll(-1) == begin).cumsum(1) - 1  # an input belongs to its target's document
        text = (y != IGNORE_INDEX).flip(1).cumsum(1).flip(1) > 0  # up to the padding
        assert torch.equal(documents[text], expected[text])
        assert documents[text].max() > 0


def test_texts_and_examples_do_not_mix(tmp_path):
    write_rows(tmp_path / "a.jsonl", PAIR_ROWS)
    write_rows(tmp_path / "b.jsonl", [{"text": "plain"}])
    with pytest.raises(InputError, match="mixes texts with examples"):
        prepare(str(tmp_path / "*.jsonl"), vocab_size=300)


def kept_apart(rows: list[dict[str, object]], folder) -> tuple[int, int]:
    """How many rows are trained on and held out, with a fifth to hold out."""
    counts = data_of(write_rows(folder / "rows.jsonl", rows)).prepared.counts
    return counts["train"].documents, counts["val"].documents


SYSTEM = {"from": "system", "value": "Be kind"}
NO_QUESTION = {
    "an empty prompt": lambda reply: {"prompt": "", "completion": reply},
    "a greeting first": lambda reply: {"conversations": [{"from": "gpt", "value": reply}]},
    "the system's words only": lambda reply: {"conversations": [SYSTEM, {"from": "gpt", "value": reply}]},
}


@pytest.mark.parametrize("row", NO_QUESTION.values(), ids=NO_QUESTION)
def test_examples_without_a_question_are_divided(tmp_path, row):
    train, val = kept_apart([row(f"poem {i}") for i in range(300)], tmp_path)
    assert train + val == 300 and 40 <= val <= 60


def test_one_prompt_for_all_examples_is_said(tmp_path, capsys):
    rows = [{"prompt": "Say anything", "completion": f"word {i}"} for i in range(20)]
    assert kept_apart(rows, tmp_path) == (20, 0)
    assert "rows.jsonl: nothing is held out, as the text is a single document" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "author", "text", "roles"),
    [
        ("messages", "role", "content", ("user", "assistant")),
        ("conversations", "from", "value", ("human", "gpt")),
    ],
    ids=["OpenAI", "ShareGPT"],
)
def test_a_reply_of_weight_zero_is_read_and_not_scored(column, author, text, roles, tmp_path):
    """Its `<|endoftext|>` is not scored either."""
    asks, replies = roles
    chat = [
        {author: asks, text: "Hi"},
        {author: replies, text: "No", "weight": 0},
        {author: asks, text: "Again"},
        {author: replies, text: "Yes", "weight": 1},
    ]
    prepared = data_of(write_rows(tmp_path / "a.jsonl", [{column: chat}]), val_fraction=0.0).prepared
    expected = [
        *stored(("### Instruction:\nHi\n\n### Response:\n", False), ("No", False)),
        ~EOT,
        *stored(("### Instruction:\nAgain\n\n### Response:\n", False), ("Yes", True)),
    ]
    assert prepared.stream("train").tokens.tolist() == expected
    assert prepared.counts["train"].scored_bytes == len("Yes")
