"""Rows as people bring them: arrays, encodings, columns by other names, some bad; where each stands."""

import gzip
import json
import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import documents, memory_limit, write, write_rows

from gpt.data.find import find_corpus
from gpt.data.formats import PART_BYTES
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.data.split import divide_corpus, held_out_bytes
from gpt.errors import InputError

TEXTS = ['a, "b" ]', "caf\u00e9 [ {", "new\nline \\ ", "\U0001f600" * 3]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("before", "comma", "after"),
    [("", "", ""), ("\ufeff\r\n ", ",", " \n"), ("", "\n,", "")],
    ids=["as json.dumps writes it", "with a mark and a comma at its end", "with a comma on its own line"],
)
def test_one_array(tmp_path, ascii_only, indent, before, comma, after):
    rows = [{"id": number, "text": text, "list": [1, [2]]} for number, text in enumerate(TEXTS)]
    array = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    text = before + array[:-1] + comma + "]" + after
    assert documents(write(tmp_path / "a.json", text)) == TEXTS
    assert documents(write(tmp_path / "a.json.gz", gzip.compress(text.encode()))) == TEXTS
    assert documents(write(tmp_path / "none.json", "[]")) == []


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_read_in_memory_that_does_not_grow_with_it(tmp_path, indent):
    """Rows of all sizes lie across the parts that are read: each comes back."""
    draw = random.Random(3)
    word = "word and " * 40_000
    sizes = [draw.choice([9, 900, 90_000, 350_000]) for _ in range(300)]
    rows = [{"text": f"{number} {word[:size]}"} for number, size in enumerate(sizes)]
    path = write(tmp_path / "a.json", json.dumps(rows, indent=indent))
    assert path.stat().st_size > 60 * PART_BYTES
    with memory_limit(8 << 20):
        for row, piece in zip(rows, find_corpus(str(path)).pieces(), strict=True):
            assert piece.text == row["text"]


def test_a_long_value_of_an_array_is_parsed_few_times(tmp_path, monkeypatch):
    """So the time grows with the file, not with its square."""
    attempts = 0

    def raw_decode(*arguments, original=json.JSONDecoder.raw_decode):
        nonlocal attempts
        attempts += 1
        return original(*arguments)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", raw_decode)
    text = "word " * (64 * PART_BYTES // 5)
    assert "".join(documents(write_rows(tmp_path / "a.json", [{"text": text}]))) == text
    assert attempts < 10


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.txt.gz"])
def test_a_byte_order_mark_says_the_encoding(tmp_path, encoding, name):
    text = "caf\u00e9 \u4e2d \U0001f600" + " and more" * 40_000
    path = tmp_path / name
    content = text if ".txt" in name else write_rows(path, [{"text": text}]).read_text("utf-8")
    mark = "" if encoding in ("utf-16", "utf-32") else "\ufeff"
    data = (mark + content).encode(encoding)
    write(path, gzip.compress(data) if name.endswith(".gz") else data)
    assert documents(path) == [text]
    corpus = find_corpus(str(path))
    assert corpus.size() is None
    assert corpus.estimated_size(0, 0) == len(content.encode())


ASKED, ANSWER = "What is it?", "A test."
EXAMPLE = f"### Instruction:\n{ASKED}\n\n### Response:\n{ANSWER}"
WITH_INPUT = f"### Instruction:\n{ASKED}\n\nThe input.\n\n### Response:\n{ANSWER}"
CHAT = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWER}]
OPENAI = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}]
WITH_SYSTEM = [
    {"from": "system", "value": "Be kind."},
    {"from": "user", "value": ASKED},
    {"from": "assistant", "value": ANSWER},
]
EXAMPLES = {
    "Alpaca with input": (
        {"instruction": ASKED, "input": "The input.", "output": ANSWER},
        WITH_INPUT,
        "Alpaca: instruction and input are the prompt, output the completion",
    ),
    "Alpaca with empty input": ({"instruction": ASKED, "input": None, "output": ANSWER}, EXAMPLE, "Alpaca"),
    "Alpaca without input": ({"output": ANSWER, "instruction": ASKED}, EXAMPLE, "Alpaca"),
    "ShareGPT": (
        {"id": "x", "conversations": CHAT},
        EXAMPLE,
        "ShareGPT: column conversations is a conversation",
    ),
    "ShareGPT with other names": (
        {"conversations": WITH_SYSTEM},
        f"Be kind.\n\n{EXAMPLE}",
        "ShareGPT",
    ),
    "messages": ({"messages": OPENAI}, EXAMPLE, "messages: column messages is a conversation"),
    "prompts": (
        {"prompt": ASKED, "completion": ANSWER},
        EXAMPLE,
        "pairs: prompt is the prompt, completion the completion",
    ),
    "questions": ({"question": ASKED, "answer": ANSWER}, EXAMPLE, "pairs: question is the prompt, answer"),
    "queries": ({"query": ASKED, "response": ANSWER}, EXAMPLE, "pairs: query is the prompt, response"),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
@pytest.mark.parametrize(("row", "expected", "told"), EXAMPLES.values(), ids=EXAMPLES)
def test_examples_are_found_by_their_columns(tmp_path, capsys, name, row, expected, told):
    """With a line that says what was taken for what."""
    path = write_rows(tmp_path / name, [row])
    assert documents(path) == [expected]
    assert f"gpt: {path} is read as {told}" in capsys.readouterr().err


def test_three_columns_by_name(tmp_path):
    rows = [{"task": ASKED, "context": "The input.", "reply": ANSWER}, {"task": ASKED, "reply": ANSWER}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert documents(path, text_column="task, context, reply") == [WITH_INPUT, EXAMPLE]
    with pytest.raises(InputError, match=r"names 4 columns: expected .*PROMPT,INPUT,COMPLETION"):
        find_corpus(str(path), text_column="a,b,c,d")
    with pytest.raises(InputError, match="has no column 'task,context,answer', it has task, context, reply"):
        documents(path, text_column="task,context,answer")


def test_text_beside_the_columns_of_examples_is_named(tmp_path, capsys):
    row = {"instruction": ASKED, "output": ANSWER, "text": "plain", "chat": OPENAI}
    path = write_rows(tmp_path / "a.jsonl", [row])
    assert documents(path) == ["plain"]
    assert "--data.text_column instruction,output reads its examples" in capsys.readouterr().err
    for column in ("instruction,output", "chat"):
        assert documents(path, text_column=column) == [EXAMPLE]


LACKING = {
    "text": ({"text": "x"}, {"note": 1}, "x", "left out 2 rows without text; the first has id"),
    "examples": (
        {"prompt": ASKED, "completion": ANSWER},
        {"prompt": ASKED},
        EXAMPLE,
        "left out 2 rows without prompt or completion; the first has id",
    ),
}


@pytest.mark.parametrize(("whole", "lacking", "expected", "told"), LACKING.values(), ids=LACKING)
def test_a_first_row_without_the_column_does_not_decide(tmp_path, capsys, whole, lacking, expected, told):
    """It is left out, and so is a later one; a line counts them."""
    path = write_rows(tmp_path / "a.jsonl", [{"id": 1}, whole, lacking, whole])
    assert documents(path) == [expected] * 2
    assert f"{path}: {told}" in capsys.readouterr().err


def test_rows_without_any_known_column(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"id": 1}, {"note": 1}])
    with pytest.raises(InputError, match="has no column 'text', it has id: choose one"):
        documents(path)


@pytest.fixture
def bad_rows(tmp_path):
    """Three rows and three that cannot be used."""
    lines = ['{"text": "x"}', "{broken", '{"text": "y"}', "7", '{"text": ["no"]}', '{"text": "z"}']
    return write(tmp_path / "a.jsonl", "\n".join(lines))


def test_bad_rows_are_left_out_and_counted_up_to_a_limit(bad_rows, capsys):
    assert documents(bad_rows, skip_bad_rows=3) == ["x", "y", "z"]
    folder = prepare(str(bad_rows), vocab_size=300, val_fraction=0, skip_bad_rows=3)
    assert Prepared(folder).counts["train"].documents == 3
    line = f"left out 3 bad rows, the first: {bad_rows} in line 2: is no JSON"
    assert line in capsys.readouterr().err
    left_out = r"in line 5: .*; 2 bad rows left out already by --skip_bad_rows"
    with pytest.raises(InputError, match=left_out):
        documents(bad_rows, skip_bad_rows=2)
    with pytest.raises(InputError, match=r"in line 2: .*; leave out bad rows with --skip_bad_rows \(gpt fit"):
        documents(bad_rows)
    with pytest.raises(InputError, match="skip_bad_rows must be at least 0"):
        find_corpus(str(bad_rows), skip_bad_rows=-1)


@pytest.mark.parametrize(("name", "place"), [("a.jsonl", "line"), ("a.parquet", "row")])
def test_a_bad_row_is_named_by_its_place_where_parts_of_a_file_are_read(tmp_path, name, place):
    """As an editor counts it, whatever was read before."""
    bad = [[{"role": f"number {number}", "content": ""}] for number in range(5_001, 30_001)]
    conversations = [OPENAI] * 5_000 + bad
    path = write_rows(tmp_path / name, [{"messages": messages} for messages in conversations])
    corpus = find_corpus(str(path))
    for most_bytes in (None, corpus.size() // 2):
        with pytest.raises(InputError, match=rf"in {place} (\d+): message 1 has the role 'number \1'"):
            list(corpus.pieces(most_bytes))


def arrow_peak(path):
    """The most bytes that Arrow had in memory for the corpus while it was read, and how many texts came."""
    before = pa.total_allocated_bytes()
    peak = count = 0
    for piece in find_corpus(str(path)).pieces():
        peak = max(peak, pa.total_allocated_bytes() - before)
        count += piece.first
    return peak, count


def test_pictures_beside_a_text_are_not_read(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["words"] * 32, "picture": [os.urandom(1 << 20)] * 32}), path)
    assert find_corpus(str(path)).size() < 10_000
    peak, count = arrow_peak(path)
    assert peak < 8 << 20
    assert count == 32
    with pytest.raises(InputError, match="has no column 'body', it has text, picture: choose"):
        find_corpus(str(path), text_column="body").size()


def test_a_large_value_that_many_rows_share_is_in_memory_once(tmp_path):
    long = "long text " * (1 << 17)
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 64, pa.int32()), pa.array([long, "short"]))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", store_schema=False)
    peak, count = arrow_peak(tmp_path / "a.parquet")
    assert peak < 16 << 20 < 64 * len(long)
    assert count == 128


def test_few_rows_are_in_memory_where_they_are_large(tmp_path):
    text = os.urandom(1 << 19).hex()
    rows = [text[number:] + text[:number] for number in range(60)]
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet", use_dictionary=False, compression=None)
    peak, count = arrow_peak(tmp_path / "a.parquet")
    assert peak < 40 << 20 < sum(map(len, rows))
    assert count == 60


def test_the_size_of_a_compressed_text_is_estimated(tmp_path):
    """A text that is larger than memory holds is held out by what it has, not by what was read of it."""
    text = "".join(f"{number * number % 7919} and {number}\n" for number in range(150_000)) * 20
    assert len(text) > 40 << 20
    corpus = find_corpus(str(write(tmp_path / "a.txt.gz", gzip.compress(text.encode(), 1))))
    divided = divide_corpus(corpus)
    assert divided.size == pytest.approx(len(text), rel=0.1)
    assert divided.rule.share == pytest.approx(held_out_bytes(len(text)) / len(text), rel=0.1)
    assert divide_corpus(corpus, most_bytes=200 << 20).size == divided.size
