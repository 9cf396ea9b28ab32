"""Rows as people bring them: arrays, encodings, columns by other names, some bad; where each stands."""

import gzip
import json
import os
import random
import re
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import documents, memory_limit, write, write_rows

from gpt.data.find import find_corpus
from gpt.data.json_array import array_rows
from gpt.data.rows import read_rows
from gpt.data.text_file import CHUNK_BYTES
from gpt.errors import InputError

TEXTS = ['a, "b" ]', "caf\u00e9 [ {", "new\nline \\ ", "\U0001f600" * 3]


ARRAYS = {
    "as json.dumps writes it": (None, "", "]"),
    "indented": (2, "", "]"),
    "with a mark and a comma at its end": (2, "\ufeff\r\n ", ",] \n"),
    "with a comma on its own line": (None, "", "\n,]"),
}


@pytest.mark.parametrize(("indent", "before", "end"), ARRAYS.values(), ids=ARRAYS)
def test_one_array(tmp_path, indent, before, end):
    rows = [{"id": number, "text": text, "list": [1, [2]]} for number, text in enumerate(TEXTS)]
    array = json.dumps(rows, indent=indent).removesuffix("]")
    assert documents(write(tmp_path / "a.json", before + array + end)) == TEXTS
    assert documents(write(tmp_path / "none.json", before + "[" + end.replace(",", ""))) == []


@pytest.mark.parametrize("cut", range(1, 24))
def test_an_array_that_is_cut_anywhere_has_the_same_values(cut):
    text = '[ 12 ,\n-3.5e2,"a" , {} ,]\n'
    parts = (text[at : at + cut] for at in range(0, len(text), cut))
    rows = [(row.number, row.value) for row in array_rows(parts)]
    assert rows == [(1, 12), (2, -350.0), (2, "a"), (2, {})]


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_read_in_memory_that_does_not_grow_with_it(tmp_path, indent):
    """Rows of all sizes lie across the parts that are read: each comes back."""
    sizes = random.Random(3).choices([9, 900, 90_000, 350_000], k=300)
    rows = [{"text": f"{number} ".ljust(size, "x")} for number, size in enumerate(sizes)]
    path = write(tmp_path / "a.json", json.dumps(rows, indent=indent))
    assert path.stat().st_size > 60 * CHUNK_BYTES
    with memory_limit(8 << 20):
        for row, piece in zip(rows, find_corpus(str(path)).pieces(), strict=True):
            assert piece.text == row["text"]


def test_a_long_value_of_an_array_is_parsed_few_times(tmp_path, monkeypatch):
    """So the time grows with the file, not with its square."""
    parse = Mock(side_effect=json.JSONDecoder().raw_decode)
    monkeypatch.setattr(json.JSONDecoder, "raw_decode", parse)
    text = "word " * (64 * CHUNK_BYTES // 5)
    assert documents(write_rows(tmp_path / "a.json", [{"text": text}])) == [text]
    assert parse.call_count < 10


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.txt.gz"])
def test_a_byte_order_mark_says_the_encoding(tmp_path, encoding, name):
    text = "caf\u00e9 \u4e2d \U0001f600" + " and more" * 40_000
    path = tmp_path / name
    content = text if ".txt" in name else write_rows(path, [{"text": text}]).read_text("utf-8")
    data = f"\ufeff{content}".encode(encoding)
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
SENT = [
    {"role": role, "content": [{"type": "text", "text": part} for part in parts]}
    for role, *parts in (("developer", "Be ", "kind."), ("user", ASKED), ("assistant", ANSWER))
]
EXAMPLES = {
    "Alpaca with input": (
        {"instruction": ASKED, "input": "The input.", "output": ANSWER},
        WITH_INPUT,
        "Alpaca: instruction and input are the prompt, output the completion",
    ),
    "Alpaca with empty input": ({"instruction": ASKED, "input": None, "output": ANSWER}, EXAMPLE, "Alpaca"),
    "Alpaca without input": ({"output": ANSWER, "instruction": ASKED}, EXAMPLE, "Alpaca"),
    "ShareGPT": ({"id": "x", "conversations": CHAT}, EXAMPLE, "ShareGPT: column conversations is a conv"),
    "ShareGPT with other names": ({"conversations": WITH_SYSTEM}, f"Be kind.\n\n{EXAMPLE}", "ShareGPT"),
    "messages": ({"messages": OPENAI}, EXAMPLE, "messages: column messages is a conversation"),
    "as sent to servers": ({"messages": SENT}, f"Be kind.\n\n{EXAMPLE}", "messages"),
    "prompts": ({"prompt": ASKED, "completion": ANSWER}, EXAMPLE, "pairs: prompt is the prompt, completion"),
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


BESIDE = {
    "conversations": {"conversations": CHAT},
    "instruction,output": {"instruction": ASKED, "output": ANSWER},
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
@pytest.mark.parametrize(("columns", "values"), BESIDE.items(), ids=BESIDE)
def test_a_text_beside_examples_is_read_unless_their_columns_are_named(
    tmp_path, capsys, name, columns, values
):
    path = write_rows(tmp_path / name, [{"text": "plain", "chat": OPENAI, **values}])
    assert documents(path) == ["plain"]
    assert f"--data.text_column {columns} reads its examples" in capsys.readouterr().err
    assert documents(path, text_column=columns) == [EXAMPLE]
    if name != "a.csv":  # where a list is a text
        assert documents(path, text_column="chat") == [EXAMPLE]


def test_three_columns_by_name(tmp_path):
    rows = [{"task": ASKED, "context": "The input.", "reply": ANSWER}, {"task": ASKED, "reply": ANSWER}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert documents(path, text_column="task, context, reply") == [WITH_INPUT, EXAMPLE]
    with pytest.raises(InputError, match=r"has no column 'task,context,reply,id', it has .*PROMPT,INPUT,COM"):
        documents(path, text_column="task,context,reply,id")
    with pytest.raises(InputError, match="has no column 'task,context,answer', it has task, context, reply"):
        documents(path, text_column="task,context,answer")


def test_a_conversation_ends_with_a_reply(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"messages": OPENAI}, {"messages": OPENAI[:1]}])
    with pytest.raises(InputError, match="in line 2: its last message is the user's, expected the assist"):
        documents(path)


WRONG_MESSAGES = {
    "mixed names": ({"from": "human", "content": "q"}, "has no role, got {'content': 'q', 'from': 'human'}"),
    "no text": (
        {"from": "human", "value": 3},
        "has no text as its content, got {'from': 'human', 'value': 3}",
    ),
}


@pytest.mark.parametrize(("message", "expected"), WRONG_MESSAGES.values(), ids=WRONG_MESSAGES)
def test_a_message_that_is_none_is_shown_as_it_stands_in_the_file(tmp_path, message, expected):
    path = write_rows(tmp_path / "a.jsonl", [{"conversations": [message, *CHAT]}])
    with pytest.raises(InputError, match=re.escape(f"in line 1: message 1 {expected}")):
        documents(path)


PAIR = {"prompt": ASKED, "completion": ANSWER}
LACKING = {
    "text": ({"text": "x"}, {"note": 1}, "x", "text"),
    "examples": (PAIR, {"prompt": ASKED}, EXAMPLE, "prompt or completion"),
}


@pytest.mark.parametrize(("whole", "lacking", "expected", "needed"), LACKING.values(), ids=LACKING)
def test_a_first_row_without_the_column_does_not_decide(tmp_path, capsys, whole, lacking, expected, needed):
    """It is left out, and so is a later one; a line counts them. There has to be a row that has it."""
    path = write_rows(tmp_path / "a.jsonl", [{"id": 1}, whole, lacking, whole])
    assert documents(path) == [expected] * 2
    assert f"{path}: left out 2 rows without {needed}; the first has id" in capsys.readouterr().err
    with pytest.raises(InputError, match="has no column 'text', it has id: choose one"):
        documents(write_rows(path, [{"id": 1}, {"note": 1}]))
    with pytest.raises(InputError, match="has no column 'text', it has nothing: choose one"):
        documents(write_rows(path, [{}]))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_a_column_may_have_commas_in_its_name(tmp_path, name):
    column = "title, year, place, text"
    path = write_rows(tmp_path / name, [{column: "x", "id": "1"}])
    assert documents(path, text_column=column) == ["x"]


EMPTY = {"text": ["", None], "completion": ["", " ", None], "messages": [[], None, ""]}


@pytest.mark.parametrize(
    ("column", "value"), [(column, value) for column in EMPTY for value in EMPTY[column]]
)
def test_empty_rows_are_left_out_and_counted(tmp_path, capsys, column, value):
    whole = {"text": {"text": "x"}, "completion": PAIR, "messages": {"messages": OPENAI}}[column]
    row = whole | {column: value}
    path = write_rows(tmp_path / "a.jsonl", [whole, row, whole, row])
    assert len(documents(path)) == 2
    assert f"{path}: left out 2 rows without text or without a completion" in capsys.readouterr().err


BAD_ROWS = ['{"text": "x"}', "{broken", '{"text": "y"}', "7", '{"text": ["no"]}', '{"text": "z"}']


def test_bad_rows_are_left_out_and_counted_up_to_a_limit(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", "\n".join(BAD_ROWS))
    assert documents(path, skip_bad_rows=3) == ["x", "y", "z"]
    assert f"left out 3 bad rows, the first: {path} in line 2: is no JSON" in capsys.readouterr().err
    left_out = r"in line 5: .*; 2 bad rows left out already by --skip_bad_rows"
    with pytest.raises(InputError, match=left_out):
        documents(path, skip_bad_rows=2)
    with pytest.raises(InputError, match=r"in line 2: .*; leave out bad rows with --skip_bad_rows \(gpt fit"):
        documents(path)


def test_the_place_of_a_bad_row_is_looked_for_only_to_tell_it(tmp_path, monkeypatch):
    """Else a file with many bad rows would be read as often."""
    looked = []
    monkeypatch.setattr(
        "gpt.data.documents.position_of", lambda name, row: looked.append(row.number) or "line 1"
    )
    path = write(tmp_path / "a.jsonl", "{broken\n" * 99 + '{"text": "x"}')
    assert documents(path, skip_bad_rows=99) == ["x"]
    assert looked == [1]


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


def pictures_beside_a_text():
    return {"text": ["words"] * 32, "picture": [os.urandom(1 << 20)] * 32}, {}


def a_long_text_in_many_rows():
    texts = pa.array(["long text " * (1 << 17), "short"])
    repeated = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 64, pa.int32()), texts)
    return {"text": repeated}, {"store_schema": False}


def long_texts():
    text = os.urandom(1 << 19).hex()
    rows = [text[number:] + text[:number] for number in range(60)]
    return {"text": rows}, {"use_dictionary": False, "compression": None}


@pytest.mark.parametrize(
    ("columns", "most"),
    [(pictures_beside_a_text, 8 << 20), (a_long_text_in_many_rows, 16 << 20), (long_texts, 40 << 20)],
)
def test_little_of_a_parquet_file_is_in_memory(tmp_path, columns, most):
    values, options = columns()
    pq.write_table(pa.table(values), tmp_path / "a.parquet", **options)
    pieces = find_corpus(str(tmp_path / "a.parquet")).pieces()
    before = pa.total_allocated_bytes()
    assert max(pa.total_allocated_bytes() - before for _ in pieces) < most


def test_the_size_of_a_compressed_text_is_estimated_from_its_beginning(tmp_path):
    text = "".join(f"{number * number % 7919} and {number}\n" for number in range(400_000))
    corpus = find_corpus(str(write(tmp_path / "a.txt.gz", gzip.compress(text.encode(), 1))))
    assert 5 << 20 < corpus.estimated_size(0, 0) == pytest.approx(len(text), rel=0.1)


def test_a_time_that_python_cannot_represent_is_in_a_bad_row(tmp_path):
    """As every value of a column of lists is read, though only its texts are used."""
    times = pa.array([[0], [1 << 53]], pa.list_(pa.timestamp("ms")))
    pq.write_table(pa.table({"text": times}), tmp_path / "a.parquet")
    first, second = read_rows(str(tmp_path / "a.parquet"), None, list)
    assert len(first.value["text"]) == 1
    assert isinstance(second.value, InputError)


TWO_COLUMNS = {"prompt": "a; b", "completion": "c, d"}
CSV = {
    "semicolons": ('prompt;completion\n"a; b";"c, d"\n', TWO_COLUMNS),
    "tabs": ("prompt\tcompletion\na; b\tc, d\n", TWO_COLUMNS),
    "blanks": ('prompt, completion\n"a; b", "c, d"\n', TWO_COLUMNS),
    "quotes": ('"prompt","completion"\n"a; b","c, d"\n', TWO_COLUMNS),
    "nothing, as there is one column": ("text\na; b\n", {"text": "a; b"}),
    "an empty line before": ('\n\nprompt,completion\na; b,"c, d"\n', TWO_COLUMNS),
    "as Excel names it": ("sep=|\nprompt|completion\na; b|c, d\n", TWO_COLUMNS),
}


@pytest.mark.parametrize(("text", "expected"), CSV.values(), ids=CSV)
def test_the_header_tells_what_separates_the_values(tmp_path, text, expected):
    path = write(tmp_path / "a.csv", text)
    (row,) = read_rows(str(path), None, list)
    assert row.value == expected
    assert text.splitlines()[row.number - 1].startswith(("a; b", '"a; b'))


HEADERS = {
    "quoted first": ('"a, b";text\n1;x\n', "x"),
    "quoted last": ('text;"a, b"\nx;1\n', "x"),
    "quoted with a blank": ('text,"a, b"\nx,1\n', "x"),
    "quoted, before a blank in a row": ('text,"a, b"\n x,1\n', " x"),
    "doubled quotes": ('text;"a, ""b"", c"\nx;1\n', "x"),
    "inches": ('text,5" pipe,6" pipe\nx,1,2\n', "x"),
    "empty names beyond the last, as of spreadsheets": ("text,,\nx,,\n", "x"),
}


@pytest.mark.parametrize(("text", "expected"), HEADERS.values(), ids=HEADERS)
def test_what_is_quoted_or_empty_in_a_header_changes_no_row(tmp_path, text, expected):
    """A quoted separator separates nothing, and only a column that is read needs a name of its own."""
    assert documents(write(tmp_path / "a.csv", text)) == [expected]
