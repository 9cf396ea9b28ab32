"""Examples: which of their tokens are stored as scored, and in which windows and batches they stand."""

from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from corpora import write_rows

from gpt.cli import main
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
PAIR_ROWS = [{"prompt": prompt, "completion": completion, "note": "n"} for prompt, completion in PAIRS]


def messages_of(pair) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]


@pytest.fixture
def pairs(tmp_path) -> str:
    return str(write_rows(tmp_path / "pairs.jsonl", PAIR_ROWS))


def prepared_of(corpus, **options) -> Prepared:
    return Prepared(prepare(str(corpus), vocab_size=300, **options))


def data_of(corpus, **options) -> TokenData:
    defaults = {"vocab_size": 300, "context_length": 128, "batch_size": 4, "val_fraction": 0.2}
    return TokenData(str(corpus), **defaults | options)


def examples(prepared) -> list[list[int]]:
    """The stored tokens of every example, those of `train` first."""
    parts = []
    for split in ("train", "val"):
        if len(stored := prepared.stream(split).tokens):
            parts += np.split(stored, prepared.document_starts(split)[1:])
    return [part.tolist() for part in parts]


def stored(*parts: tuple[str, bool]) -> list[int]:
    """An example by the definition: ids of completions and their ends, -1 - id for all else."""
    ids: list[int] = []
    for text, scored in parts:
        encoded = TOKENIZER.encode(text)
        ids += [*encoded, EOT] if scored else [-1 - id_ for id_ in encoded]
    return ids


def scored_tokens(batch) -> int:
    return int((batch[1] != IGNORE_INDEX).sum())


def trained_together(data, rank, processes, accumulate):
    """The loader of one of so many processes."""
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=processes,
        accumulate_grad_batches=accumulate,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    return data.train_dataloader()


@pytest.mark.parametrize("place", [0, 8 * 5], ids=["at the beginning", "across the end of an epoch"])
def test_weights_of_the_batches_of_an_update(pairs, place):
    """2 processes have 3 batches of 4 windows each."""
    batches = []
    for rank in (0, 1):
        loader = trained_together(data_of(pairs), rank, processes=2, accumulate=3)
        loader.load_state_dict({"windows": place})
        assert len(loader) * 8 > loader.dataset.windows.count
        batches.append(list(islice(loader, 6)))
    for update in (slice(0, 3), slice(3, 6)):
        ours = [batch for process in batches for batch in process[update]]
        scored = torch.tensor([scored_tokens(batch) for batch in ours])
        assert len(set(scored.tolist())) > 1
        weights = torch.stack([batch.weight for batch in ours])
        torch.testing.assert_close(weights, scored / scored.double().mean(), check_dtype=False)


def test_batches_have_no_weights_where_nothing_differs(pairs, text_file):
    alone = trained_together(data_of(pairs), 0, processes=1, accumulate=1)
    text = trained_together(data_of(text_file, context_length=16), 0, processes=2, accumulate=2)
    assert [len(next(iter(loader))) for loader in (alone, text)] == [2, 2]


def test_the_tokens_of_pairs(pairs):
    prepared = prepared_of(pairs, val_fraction=0.2)
    expected = [stored((f"### Instruction:\n{p}\n\n### Response:\n", False), (c, True)) for p, c in PAIRS]
    assert sorted(examples(prepared)) == sorted(expected)
    assert prepared.dtype == "<i4"


def test_a_conversation_with_a_template_of_its_own(tmp_path):
    template = Template(system="<{content}>", user="U: {content}\n", assistant="A: {content}")
    system = {"role": "system", "content": "Be kind"}
    chat = [system, *messages_of(("Hi", "Hello")), *messages_of(("So?", "So."))]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": chat}])
    prepared = prepared_of(path, val_fraction=0, template=template)
    parts = (("<Be kind>U: Hi\nA: ", False), ("Hello", True), ("U: So?\nA: ", False), ("So.", True))
    assert examples(prepared) == [stored(*parts)]
    assert prepared.template == vars(template)
    counts = prepared.counts["train"]
    assert counts.scored_tokens == len(TOKENIZER.encode("Hello")) + len(TOKENIZER.encode("So.")) + 2
    assert counts.scored_bytes == len("HelloSo.")
    assert prepared_of(path, val_fraction=0).folder != prepared.folder


def test_a_template_from_the_command_line(pairs, tmp_path):
    options = ["--vocab_size", "300", "--output", str(tmp_path / "out")]
    assert main(["prepare", pairs, *options, "--template.user", "Q {content}\n"]) == 0
    assert Prepared(tmp_path / "out").template == vars(Template(user="Q {content}\n"))


def completions(batch) -> list[tuple[str, tuple[int, ...]]]:
    """What stands before each completion of a batch and itself, in its window, with the ids of its end."""
    pairs = []
    for inputs, targets in zip(batch[0].tolist(), batch[1].tolist(), strict=True):
        begin = 0
        for end in (place + 1 for place, target in enumerate(targets) if target == EOT):
            completion = [target for target in targets[begin:end] if target != IGNORE_INDEX]
            text = TOKENIZER.decode([id_ for id_ in inputs[begin:end] if id_ != EOT])
            pairs.append((text, tuple(completion)))
            begin = end
        assert not [target for target in targets[begin:] if target != IGNORE_INDEX]
    return pairs


def test_every_completion_is_a_target_once_behind_its_whole_prompt(pairs):
    data = data_of(pairs)
    expected = [
        (f"### Instruction:\n{prompt}\n\n### Response:\n{completion}", (*TOKENIZER.encode(completion), EOT))
        for prompt, completion in PAIRS
    ]
    train = [pair for batch in data.train_dataloader() for pair in completions(batch)]
    val = [pair for batch in data.val_dataloader() for pair in completions(batch)]
    assert len(set(train)) == data.prepared.counts["train"].documents
    assert sorted({*train, *val}) == sorted(expected)
    assert len(val) == data.prepared.counts["val"].documents


def test_what_is_left_out_and_what_is_cut(tmp_path, capsys):
    """No batch has a loss of no tokens; an example without a completion is none."""
    rows = [{"prompt": "long " * (40 if i % 5 == 0 else 1) + str(i), "completion": "yes"} for i in range(40)]
    rows += [{"prompt": "Hi", "completion": text} for text in ("", "  ", None)]
    data = data_of(write_rows(tmp_path / "a.jsonl", rows), context_length=64, batch_size=1)
    scored = [scored_tokens(batch) for batch in data.train_dataloader()]
    counts = data.prepared.counts["train"]
    assert min(scored) > 0
    assert sum(scored) == counts.scored_tokens
    lengths = [len(example) for example in examples(data.prepared)]
    assert len(lengths) == 40
    assert max(lengths) > 128
    train = counts.documents
    told = capsys.readouterr().err
    cut = sum(length > 64 for length in lengths[:train])
    assert f"examples longer than the context_length of 64 are cut, {cut} of {train}, so their" in told
    assert "give --model.config.context_length 256" in told


def test_a_conversation_without_a_reply_at_its_end_is_named(tmp_path):
    chat = messages_of(("a", "b"))
    path = write_rows(tmp_path / "a.jsonl", [{"messages": chat}] * 300 + [{"messages": chat[:1]}])
    with pytest.raises(InputError, match=f"^{path} in line 301: its last message is the user's"):
        prepare(str(path), vocab_size=300)


@pytest.mark.parametrize("split", ["train", "val"])
def test_isolate_keeps_a_conversation_together_with_all_its_turns(split, tmp_path):
    rows = [{"messages": messages_of((f"{n}?", f"{n}!")) * 2} for n in range(60)]
    data = data_of(write_rows(tmp_path / "a.jsonl", rows), isolate=True, context_length=512, batch_size=1)
    stream, starts = data.prepared.stream(split), data.prepared.document_starts(split)
    inputs = np.array([stream.eot, *token_ids(stream.tokens)])  # each target with its input before it
    loader = data.train_dataloader() if split == "train" else data.val_dataloader()
    x, _, documents = (part[0].numpy() for part in next(iter(loader)))
    size = np.flatnonzero(x)[-1] + 1  # without padding
    (begin,) = (start for start in starts if np.array_equal(inputs[start : start + size], x[:size]))
    expected = [(starts <= begin + place).sum() - (starts <= begin).sum() for place in range(size)]
    assert documents[:size].tolist() == expected
    assert expected[-1] > 0  # several conversations in the window


def test_texts_and_examples_do_not_mix(tmp_path):
    write_rows(tmp_path / "a.jsonl", PAIR_ROWS)
    write_rows(tmp_path / "b.jsonl", [{"text": "plain"}])
    with pytest.raises(InputError, match="mixes texts with examples"):
        prepare(str(tmp_path / "*.jsonl"), vocab_size=300)
