"""Rows as people bring them: arrays, encodings, columns by other names, some bad; where each stands."""

import gzip
import json
import os
import random
import time
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt.data.corpus import Corpus
from gpt.data.find import find_corpus
from gpt.data.formats import PART_BYTES
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.data.split import divide_corpus, held_out_bytes
from gpt.errors import InputError


def documents(path, **options):
    found = []
    for piece in find_corpus(str(path), **options).pieces():
        if piece.first:
            found.append("")
        found[-1] += piece.text
    return found


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


TEXTS = ['a, "b" ]', "caf\u00e9 [ {", "new\nline \\ ", "\U0001f600" * 3]
ROWS = [{"id": number, "text": text, "list": [1, [2]]} for number, text in enumerate(TEXTS)]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("before", "comma", "after"), [("", "", ""), ("\ufeff\r\n ", ",", " \n"), ("", "\n,", "")]
)
def test_one_array(tmp_path, ascii_only, indent, before, comma, after):
    """On one line or many, also with a comma at its end."""
    text = json.dumps(ROWS, indent=indent, ensure_ascii=ascii_only)
    text = before + text[:-1] + comma + "]" + after
    assert documents(write(tmp_path / "a.json", text)) == TEXTS
    assert documents(write(tmp_path / "a.json.gz", gzip.compress(text.encode()))) == TEXTS
    assert documents(write(tmp_path / "b.json", "[]")) == []


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_read_in_time_and_memory_that_do_not_grow_with_it(tmp_path, indent):
    """Rows of all sizes lie across the parts that are read: each comes back."""
    draw = random.Random(3)
    word = "word and " * 40_000
    rows = [{"text": f"{number} " + word[: draw.choice([9, 900, 90_000, 350_000])]} for number in range(300)]
    path = write(tmp_path / "a.json", json.dumps(rows, indent=indent))
    assert path.stat().st_size > 60 * PART_BYTES
    assert documents(path) == [row["text"] for row in rows]
    began = time.process_time()
    for _ in documents(write(tmp_path / "b.json", json.dumps(rows[:60], indent=indent))):
        pass
    part = time.process_time() - began
    tracemalloc.start()
    try:
        began = time.process_time()
        count = sum(1 for _ in find_corpus(str(path)).pieces())
        assert count == 300
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        assert time.process_time() - began < 60 * part + 5
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.txt.gz"])
def test_a_byte_order_mark_says_the_encoding(tmp_path, encoding, name):
    text = "caf\u00e9 \u4e2d \U0001f600" + " and more" * 40_000
    content = {
        "a.jsonl": json.dumps({"text": text}, ensure_ascii=False) + "\r\n",
        "a.json": json.dumps([{"text": text}], ensure_ascii=False),
        "a.csv": f"text\r\n{text}\r\n",
    }.get(name, text)
    data = (("" if encoding in ("utf-16", "utf-32") else "\ufeff") + content).encode(encoding)
    path = write(tmp_path / name, gzip.compress(data) if "gz" in name else data)
    assert documents(path) == [text]
    corpus = find_corpus(str(path))
    assert corpus.size() is None
    assert corpus.estimated_size(0, 0) == len(content.encode())


ASKED, ANSWER = "What is it?", "A test."
EXAMPLE = f"### Instruction:\n{ASKED}\n\n### Response:\n{ANSWER}"
WITH_INPUT = f"### Instruction:\n{ASKED}\n\nThe input.\n\n### Response:\n{ANSWER}"
CHAT = [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWER}]
SYSTEM = [{"from": "system", "value": "Be kind."}]


@pytest.mark.parametrize(
    ("row", "expected", "told"),
    [
        (
            {"instruction": ASKED, "input": "The input.", "output": ANSWER},
            WITH_INPUT,
            "Alpaca: instruction and input are the prompt, output the completion",
        ),
        ({"instruction": ASKED, "input": "", "output": ANSWER}, EXAMPLE, "Alpaca"),
        ({"instruction": ASKED, "input": None, "output": ANSWER}, EXAMPLE, "Alpaca"),
        ({"output": ANSWER, "instruction": ASKED}, EXAMPLE, "Alpaca"),
        ({"id": "x", "conversations": CHAT}, EXAMPLE, "ShareGPT: column conversations is a conversation"),
        ({"conversations": SYSTEM + CHAT}, "Be kind.\n\n" + EXAMPLE, "ShareGPT"),
        (
            {"conversations": [{"from": "user", "value": ASKED}, {"from": "assistant", "value": ANSWER}]},
            EXAMPLE,
            "ShareGPT",
        ),
        (
            {"messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}]},
            EXAMPLE,
            "messages: column messages is a conversation",
        ),
        (
            {"prompt": ASKED, "completion": ANSWER},
            EXAMPLE,
            "pairs: prompt is the prompt, completion the completion",
        ),
        (
            {"question": ASKED, "answer": ANSWER},
            EXAMPLE,
            "pairs: question is the prompt, answer the completion",
        ),
        (
            {"query": ASKED, "response": ANSWER},
            EXAMPLE,
            "pairs: query is the prompt, response the completion",
        ),
    ],
)
def test_examples_are_found_by_their_columns(tmp_path, capsys, row, expected, told):
    """In each kind of file, with a line that says what was taken for what."""
    texts = {
        name: value or "" if isinstance(value, str | None) else json.dumps(value)
        for name, value in row.items()
    }
    cells = ['"' + value.replace('"', '""') + '"' for value in texts.values()]
    files = {
        "a.jsonl": lines([row]),
        "a.json": json.dumps([row, row][:1], indent=1),
        "a.csv": ",".join(row) + "\n" + ",".join(cells) + "\n",
    }
    for name, content in files.items():
        assert documents(write(tmp_path / name, content)) == [expected], name
        assert f"gpt: {tmp_path / name} is read as {told}" in capsys.readouterr().err
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == [expected]


def test_three_columns_by_name(tmp_path):
    rows = [{"task": ASKED, "context": "The input.", "reply": ANSWER}, {"task": ASKED, "reply": ANSWER}]
    path = write(tmp_path / "a.jsonl", lines(rows))
    assert documents(path, text_column="task, context, reply") == [WITH_INPUT, EXAMPLE]
    with pytest.raises(InputError, match=r"names 4 columns: expected .*PROMPT,INPUT,COMPLETION"):
        find_corpus(str(path), text_column="a,b,c,d")
    with pytest.raises(InputError, match="has no column 'task,context,answer', it has task, context, reply"):
        documents(path, text_column="task,context,answer")


def test_text_beside_the_columns_of_examples_is_named(tmp_path, capsys):
    rows = [{"instruction": ASKED, "output": ANSWER, "text": "plain"}]
    path = write(tmp_path / "a.jsonl", lines(rows))
    assert documents(path) == ["plain"]
    assert "--data.text_column instruction,output reads its examples" in capsys.readouterr().err
    assert documents(path, text_column="instruction,output") == [EXAMPLE]


def test_a_first_row_without_the_column_does_not_decide(tmp_path, capsys):
    """It is left out, and so is a later one; the line counts them."""
    path = write(
        tmp_path / "a.jsonl", lines([{"id": 1}, {"text": "x", "id": 2}, {"note": "z"}, {"text": "y"}])
    )
    assert documents(path) == ["x", "y"]
    assert f"{path}: left out 2 rows without text; the first has id" in capsys.readouterr().err
    rows = [{"id": 1}, {"prompt": ASKED, "completion": ANSWER}, {"prompt": ASKED}]
    assert documents(write(tmp_path / "b.jsonl", lines(rows))) == [EXAMPLE]
    assert "left out 2 rows without prompt or completion" in capsys.readouterr().err
    with pytest.raises(InputError, match="has no column 'text', it has id: choose one"):
        documents(write(tmp_path / "c.jsonl", lines([{"id": 1}, {"note": 1}])))


BAD = ['{"text": "x"}', "{broken", '{"text": "y"}', "7", '{"text": ["no"]}', '{"text": "z"}']


def test_bad_rows_are_left_out_and_counted_up_to_a_limit(tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", "\n".join(BAD))
    assert documents(path, skip_bad_rows=3) == ["x", "y", "z"]
    line = f"left out 3 bad rows, the first: {path} in line 2: is no JSON"
    assert line in capsys.readouterr().err
    with pytest.raises(InputError, match=r"in line 5: .*; 2 bad rows left out already by --skip_bad_rows"):
        documents(path, skip_bad_rows=2)
    with pytest.raises(InputError, match=r"in line 2: .*; leave out bad rows with --skip_bad_rows \(gpt fit"):
        documents(path)
    write(tmp_path / "b.csv", "id,text\n1,x\n2,y,more\n3,z\n")
    assert documents(tmp_path / "b.csv", skip_bad_rows=1) == ["x", "z"]
    write(tmp_path / "c.json", '[{"text": "x"}, 7, {"text": "z"}]')
    assert documents(tmp_path / "c.json", skip_bad_rows=1) == ["x", "z"]
    with pytest.raises(InputError, match="skip_bad_rows must be at least 0"):
        find_corpus(str(path), skip_bad_rows=-1)
    folder = prepare(str(path), vocab_size=300, val_fraction=0, skip_bad_rows=3)
    assert Prepared(folder).counts["train"].documents == 3


def test_a_bad_row_is_named_by_its_line_where_parts_of_a_file_are_read(tmp_path):
    """As an editor counts it, whatever was read before."""
    rows = [json.dumps({"text": f"{number} " + "words " * 40}) for number in range(12_000)]
    bad = 9_000
    for name, text in (
        ("a.jsonl", "\n\n".join(rows)),
        ("b.csv", 'id,text\n1,"a\nb"\n' + "2,x\n" * 9_000 + "3\n"),
    ):
        write(tmp_path / name, text)
    whole = (tmp_path / "a.jsonl").read_text(encoding="utf-8").split("\n")
    for number in range(2 * bad, len(whole), 2):
        whole[number] = '{"text": 7}'
    write(tmp_path / "a.jsonl", "\n".join(whole))
    corpus = find_corpus(str(tmp_path / "a.jsonl"))
    with pytest.raises(InputError, match="in line ") as error:
        list(corpus.pieces(corpus.size() // 2))
    line = int(str(error.value).partition("in line ")[2].partition(":")[0])
    assert line > 2 * bad and whole[line - 1] == '{"text": 7}'
    with pytest.raises(InputError, match=f"in line {2 * bad + 1}: column 'text' holds int"):
        list(corpus.pieces())
    table = pa.table({"messages": [[{"role": "user", "content": "a"}]] * 900})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=100)
    corpus = Corpus(files=(str(tmp_path / "c.parquet"),), text_column="messages")
    first = next(number for number, sizes in enumerate(corpus._part_sizes[0]) if sizes)
    with pytest.raises(InputError, match=f"in row {first * 100 + 1}: its last message is the user's"):
        list(corpus.pieces())


def arrow_peak(path):
    """The most that Arrow had in memory beyond what it had before, while a corpus was read, and its texts."""
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
    values = pa.array(["long text " * (1 << 17), "short"])
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0, 1] * 64, pa.int32()), values)})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False)
    peak, count = arrow_peak(tmp_path / "a.parquet")
    assert peak < 16 << 20 < 64 * len("long text " * (1 << 17))
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
    lines = "".join(f"{number * number % 7919} and {number}\n" for number in range(150_000))
    text = lines * 20
    path = write(tmp_path / "a.txt.gz", gzip.compress(text.encode(), 1))
    divided = divide_corpus(find_corpus(str(path)))
    assert len(text) > 40 << 20
    assert divided.size == pytest.approx(len(text), rel=0.1)
    assert divided.rule.share == pytest.approx(held_out_bytes(len(text)) / len(text), rel=0.1)
    assert divide_corpus(find_corpus(str(path)), None, 200 << 20).size == divided.size
