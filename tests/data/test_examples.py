import csv
import json
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpt.data.module import TokenData
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.data.stored import token_ids
from gpt.data.windows import IGNORE_INDEX
from gpt.errors import InputError
from gpt.text.template import Template
from gpt.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer("gpt2", vocab_size=300)
EOT = TOKENIZER.eot
PAIRS = [(f"What is {i} of caf\u00e9?", f"{i * i} <|endoftext|>!" + " more" * (i % 4)) for i in range(60)]


def messages_of(pair) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]


def write_rows(path, rows):
    """Rows as JSON lines, CSV or Parquet, according to the name."""
    if ".parquet" in path.name:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif ".csv" in path.name:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def pairs(tmp_path):
    return write_rows(tmp_path / "pairs.jsonl", [{"prompt": p, "completion": c} for p, c in PAIRS])


def data_of(corpus, **options):
    defaults = {"vocab_size": 300, "context_length": 128, "batch_size": 4, "val_fraction": 0.2}
    return TokenData(corpus, **defaults | options)


def documents(prepared):
    """The stored tokens of every document, in both splits."""
    found = []
    for split in ("train", "val"):
        stored = prepared.stream(split).tokens
        parts = np.split(stored, prepared.document_starts(split)[1:]) if len(stored) else []
        found += [part.tolist() for part in parts]
    return found


def stored(*parts: tuple[str, bool]) -> list[int]:
    """An example by the definition: ids of completions and their ends, -1 - id for all else."""
    ids: list[int] = []
    for text, scored in parts:
        found = TOKENIZER.encode(text)
        ids += [*found, EOT] if scored else [-1 - id_ for id_ in found]
    return ids


def trained_together(data, rank, processes, accumulate):
    """The loader of one of so many processes."""
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=processes,
        accumulate_grad_batches=accumulate,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    return data.train_dataloader()


@pytest.mark.parametrize("place", [0, 8 * 5])
def test_weights_of_the_batches_of_an_update(pairs, place):
    """2 processes have 3 batches of 4 windows each, across the end of an epoch."""
    loaders = [trained_together(data_of(pairs), rank, processes=2, accumulate=3) for rank in (0, 1)]
    for loader in loaders:
        loader.load_state_dict({"windows": place})
        assert len(loader) * 8 > loader.dataset.windows.count
    batches = [list(islice(loader, 6)) for loader in loaders]  # two updates
    for update in (slice(0, 3), slice(3, 6)):
        ours = [batch for process in batches for batch in process[update]]
        scored = torch.tensor([int((batch.y != IGNORE_INDEX).sum()) for batch in ours])
        assert len(set(scored.tolist())) > 1
        weights = torch.stack([batch.weight for batch in ours])
        torch.testing.assert_close(weights, scored / scored.double().mean(), check_dtype=False)


def test_batches_have_no_weights_where_nothing_differs(pairs, text_file):
    alone = trained_together(data_of(pairs), 0, processes=1, accumulate=1)
    text = trained_together(data_of(str(text_file), context_length=16), 0, processes=2, accumulate=2)
    assert [len(next(iter(loader))) for loader in (alone, text)] == [2, 2]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.jsonl", "pairs"), ("a.csv", "pairs"), ("a.jsonl", "messages"), ("a.parquet", "messages")],
)
def test_the_tokens_of_every_format(name, kind, tmp_path):
    rows = [{"prompt": p, "completion": c, "note": "n"} for p, c in PAIRS]
    if kind == "messages":
        rows = [{"messages": messages_of(pair)} for pair in PAIRS]
    prepared = Prepared(prepare(write_rows(tmp_path / name, rows), vocab_size=300, val_fraction=0.2))
    expected = [stored((f"### Instruction:\n{p}\n\n### Response:\n", False), (c, True)) for p, c in PAIRS]
    assert sorted(documents(prepared)) == sorted(expected)
    assert prepared.dtype == "<i4" and prepared.counts["val"].documents > 0


def test_a_conversation_with_a_template_of_its_own(tmp_path):
    template = Template(system="<{content}>", user="U: {content}\n", assistant="A: {content}")
    chat = [
        {"role": "system", "content": "Be kind"},
        *messages_of(("Hi", "Hello")),
        *messages_of(("So?", "So.")),
    ]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": chat}])
    prepared = Prepared(prepare(path, vocab_size=300, val_fraction=0, template=template))
    parts = (("<Be kind>U: Hi\nA: ", False), ("Hello", True), ("U: So?\nA: ", False), ("So.", True))
    assert documents(prepared) == [stored(*parts)]
    assert prepared.template == vars(template)
    tokens = len(TOKENIZER.encode("Hello")) + len(TOKENIZER.encode("So.")) + 2
    assert (prepared.counts["train"].scored_tokens, prepared.counts["train"].scored_bytes) == (
        tokens,
        len("HelloSo."),
    )
    assert prepare(path, vocab_size=300, val_fraction=0) != prepared.folder


def test_a_template_from_the_command_line(pairs, tmp_path, capsys):
    from gpt.cli import main

    options = ["--vocab_size", "300", "--output", str(tmp_path / "out"), "--template.user", "Q {content}\n"]
    assert main(["prepare", pairs, *options]) == 0
    assert Prepared(tmp_path / "out").template == vars(Template(user="Q {content}\n"))
    assert main(["prepare", pairs, *options[:-1], "no place"]) == 2
    assert "user must be a text with one {content}" in capsys.readouterr().err


def test_other_columns_and_a_text_first(tmp_path):
    rows = [{"question": p, "answer": c, "chat": messages_of((p, c)), "text": "plain"} for p, c in PAIRS]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert Prepared(prepare(path, vocab_size=300)).template is None
    by_pair = Prepared(prepare(path, vocab_size=300, text_column="question,answer"))
    by_chat = Prepared(prepare(path, vocab_size=300, text_column="chat"))
    assert sorted(documents(by_pair)) == sorted(documents(by_chat)) != []


def test_every_completion_is_a_target_once_behind_its_whole_prompt(pairs):
    data = data_of(pairs)
    expected = [[id_ for id_ in part if id_ >= 0] for part in documents(data.prepared)]
    uncut = {f"### Instruction:\n{prompt}\n\n### Response:\n{completion}" for prompt, completion in PAIRS}
    for loader, split in ((data.train_dataloader(), "train"), (data.val_dataloader(), "val")):
        found, count = [], data.prepared.counts[split].documents
        for x, y in loader:
            for inputs, targets in zip(x.tolist(), y.tolist(), strict=True):
                completion, begun = [], 0
                for read, target in enumerate(targets, start=1):
                    if target != IGNORE_INDEX:
                        completion.append(target)
                    if target == EOT:
                        found.append(completion)
                        assert TOKENIZER.decode([i for i in inputs[begun:read] if i != EOT]) in uncut
                        completion, begun = [], read
                assert not completion
        unique = {tuple(completion) for completion in found}
        assert len(unique) == count
        expected = [one for one in expected if tuple(one) not in unique]
    assert expected == []


def test_what_is_left_out_and_what_is_cut(tmp_path, capsys):
    """No batch has a loss of no tokens; an example without a completion is none."""
    rows = [{"prompt": "long " * (40 if i % 5 == 0 else 1) + str(i), "completion": "yes"} for i in range(40)]
    rows += [{"prompt": "Hi", "completion": text} for text in ("", "  ", None)]
    data = data_of(write_rows(tmp_path / "a.jsonl", rows), context_length=64, batch_size=1)
    batches = list(data.train_dataloader())
    assert len(documents(data.prepared)) == 40
    assert min(int((y != IGNORE_INDEX).sum()) for _, y in batches) > 0
    assert (
        sum(int((y != IGNORE_INDEX).sum()) for _, y in batches) == data.prepared.counts["train"].scored_tokens
    )
    lengths = [len(part) for part in documents(data.prepared)]
    train = data.prepared.counts["train"].documents
    cut = sum(length > 64 for length in lengths[:train])
    assert max(lengths) > 128
    assert (
        f"examples longer than the context_length of 64 are cut, {cut} of {train}, so their "
        "completions lack some of the prompt: give --model.config.context_length 256"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}], "has no column 'text', it has prompt: choose one with --text_column"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "line 1: its last message is the user's"),
        ([{"messages": [{"role": "tool", "content": "a"}]}], "line 1: message 1 has the role 'tool'"),
        ([{"messages": []}], "line 1: expected a list of messages"),
        ([{"messages": "no list"}], "line 1: expected a list of messages, got 'no list'"),
        ([{"messages": None}], "line 1: expected a list of messages, got None"),
        ([{"prompt": 1, "completion": "a"}], "line 1: column 'prompt' holds int, expected text"),
        (
            [{"messages": messages_of("ab")}] * 300 + [{"messages": messages_of("ab")[:1]}],
            "in line 301: its last",
        ),
    ],
)
def test_bad_rows_are_named(rows, message, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(InputError, match=message) as error:
        prepare(path, vocab_size=300)
    assert path in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("split", ["train", "val"])
def test_isolate_keeps_a_conversation_together_with_all_its_turns(split, tmp_path):
    rows = [{"messages": messages_of((f"{n}?", f"{n}!")) * 2} for n in range(60)]
    data = data_of(write_rows(tmp_path / "a.jsonl", rows), isolate=True, context_length=512, batch_size=1)
    stream, starts = data.prepared.stream(split), data.prepared.document_starts(split)
    loader = data.train_dataloader() if split == "train" else data.val_dataloader()
    x, _, documents = next(iter(loader))
    stored = np.array([stream.eot, *token_ids(stream.tokens)])  # each target with its input before it
    for row, numbers in zip(x.numpy(), documents.numpy(), strict=True):
        size = np.flatnonzero(row)[-1] + 1  # without padding
        (begin,) = (start for start in starts if np.array_equal(stored[start : start + size], row[:size]))
        assert numbers[:size].tolist() == [
            int((starts <= begin + place).sum() - (starts <= begin).sum()) for place in range(size)
        ]
        assert numbers[size - 1] > 0  # several conversations in the window


def test_texts_and_examples_do_not_mix(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"prompt": p, "completion": c} for p, c in PAIRS])
    write_rows(tmp_path / "b.jsonl", [{"text": "plain"}])
    with pytest.raises(InputError, match="mixes texts with examples"):
        prepare(str(tmp_path / "*.jsonl"), vocab_size=300)
