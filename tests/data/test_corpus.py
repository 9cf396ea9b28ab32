"""What is read of files of each format: never silently less than they hold, or something else."""

import gzip
import io
import lzma
import tarfile
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import documents, memory_limit, write, write_rows, write_texts

from gpt.data.find import find_corpus
from gpt.errors import InputError


def test_text_files_are_documents_byte_for_byte(tmp_path):
    texts = {"a.txt": "one\r\ntwo\rthree\n", "b/c.md": "caf\u00e9 \u4e2d\n\n"}
    for name, text in {**texts, "empty.txt": ""}.items():
        write(tmp_path / "texts" / name, text)
    assert documents(tmp_path / "texts") == list(texts.values())
    assert documents(tmp_path / "texts" / "a.txt") == [texts["a.txt"]]
    assert documents(tmp_path / "texts" / "**" / "*.md") == [texts["b/c.md"]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL.GZ", "a.json", "a.csv", "a.tsv", "a.parquet"])
def test_every_format_gives_the_same_documents(tmp_path, texts, name):
    assert documents(write_texts(tmp_path / name, texts)) == texts
    lines = write_texts(tmp_path / "b.jsonl", texts)
    assert documents(lines.rename(tmp_path / "lines.json")) == texts


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "marked as Windows does"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a[1].jsonl", "a::b.jsonl"])
def test_texts_that_look_like_something_else_stay_texts(tmp_path, name, mark):
    """The only value of a column, so that a reader which guesses types has no counterexample."""
    write(tmp_path / "a1.jsonl", '{"text": "of another file"}')  # which the pattern a[1] matches
    for text in ("NA", "None", "null", "007", "1.10", "true", "2021-05-05", "[1]", "caf\u00e9"):
        path = write_rows(tmp_path / name, [{"text": text}] * 2)
        write(path, mark + path.read_bytes())
        assert documents(path) == [text] * 2


def test_the_column_that_is_named_is_read(tmp_path):
    lines = '{"id": 5, "body": "x"}\n{"body": null}\n{"body": ""}\n\n{"body": "y"}'
    path = write(tmp_path / "a.jsonl", lines)
    assert documents(path, text_column="body") == ["x", "y"]
    with pytest.raises(InputError, match=r"a.jsonl in line 1: column 'id' holds int, expected text"):
        documents(path, text_column="id")


def tar_of(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def two_columns(*names: str) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table([["x"], ["y"]], names=list(names)), buffer)
    return buffer.getvalue()


NO_ARRAY = "the array is no JSON"
BAD_FILES = {
    "a.json": {
        "a deep array": ("[" * 100_000, r"a\.json is nested too deeply$"),
        "no colon": ('[\n {"text": "x"},\n {"text" 5}]', f"in line 3: {NO_ARRAY}, Expecting ':'"),
        "an early end": ('[\n {"text": "x"},\n {"text":', f"in line 3: {NO_ARRAY}, Expecting value"),
        "a number": ('[\n{"text": "x"}, 7]', "in line 2: expected an object, got 7"),
        "thousands of digits": (f'[\n{{"text": {"7" * 5000}}}]', "in line 2: Exceeds the"),
        "more text": ('[{"text": "x"}]\n{}', "in line 1: text follows the end of the array"),
        "more text, far behind": (
            '[{"text": "x"}]' + "\n" * 600_000 + "{}",
            "in line 1: text follows the end",
        ),
        "two commas": ('[\n{"text": "x"},\n,{}]', f"in line 3: {NO_ARRAY}, Expecting value"),
        "a comma first": ('[\n,\n{"text": "x"}]', f"in line 2: {NO_ARRAY}, Expecting value"),
        "no comma": ('[{"text": "x"}\n{}]', f"in line 2: {NO_ARRAY}, Expecting ',' delimiter"),
        "no end": ('[{"text": "x"}', f"in line 1: {NO_ARRAY}, Expecting ',' delimiter"),
    },
    "a.jsonl": {
        "an early end": (
            '{"text": "x"}\n\n{"text": \n',
            r"a\.jsonl in line 3: is no JSON, Expecting value in column 1: expected an object on each line",
        ),
        "thousands of digits": (
            f'{{"text": {"7" * 5000}}}',
            r"a\.jsonl in line 1: Exceeds the limit .*digits",
        ),
        "a deep line": ('{"text": ' + "[" * 100_000, r"a\.jsonl in line 1: is nested too deeply"),
    },
    "a.csv": {
        "two columns of one name": ("text,text\nx,y\n", r"a\.csv has two columns 'text': rename one"),
        "many values": ("id,text\n1,x\n2,y,z\n", r"a\.csv in line 3: it has more values than the header"),
        "an open quote": ('id,text\n1,"x\n2,y\n', r"a\.csv in line 3: unexpected end of data"),
        "UTF-16": ("text,id\n".encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8"),
    },
    "a.csv.gz": {"not compressed": ("text", r"cannot read .*a\.csv\.gz \(BadGzipFile")},
    "a.txt.gz": {
        "half of it": (gzip.compress(b"text" * 999)[:-9], r"cannot read .*a\.txt\.gz \(EOFError"),
        "damaged inside": (
            gzip.compress(b"text" * 999)[:10] + b"\xff" * 20,
            r"cannot read .*a\.txt\.gz \(error: Error -3 while decompressing",
        ),
        "a NUL byte": (gzip.compress(b"some text \0"), "a.txt.gz is binary"),
    },
    "a.txt": {
        "Western text": (
            b"a caf\xe9",
            r"byte 5 cannot be decoded; iconv -f WINDOWS-1252 -t UTF-8 .*a.txt > .*a-utf8.txt",
        ),
        "a bad byte far behind": (
            ("\u00e9\n" * 300_000).encode() + b"\xff",
            "is not UTF-8 text: byte 900000 ",
        ),
        "UTF-16": ("text".encode("utf-16-le"), "seems to be UTF-16LE .*: iconv -f UTF-16LE -t UTF-8"),
        "a NUL byte": (b"some text \0 and more", "a.txt is binary: expected text, JSON lines"),
    },
    "a.txt.xz": {
        "Western text": (
            lzma.compress(b"a caf\xe9"),
            r"byte 5 .*; xz -dc .*a.txt.xz \| iconv -f WINDOWS-1252 -t UTF-8 > .*a-utf8.txt converts it",
        ),
    },
    "a b.txt": {
        "Russian text": (
            "\u043c\u0438\u0440 ".encode("koi8-r") * 9,
            r"byte 0 .*; iconv -f ENCODING -t UTF-8 '.*a b.txt'",
        ),
    },
    "a.png": {"by its name": (b"text", "a.png is binary: expected text")},
    "a.tar.gz": {
        "an archive": (gzip.compress(tar_of("a.txt", b"some text")), r"a\.tar\.gz is an archive: unpack")
    },
    "a.zip": {"an archive": (b"PK\3\4", r"a\.zip is an archive: unpack it, and give the folder")},
    "a.parquet": {
        "no Parquet": ("text", r"cannot read .*a\.parquet"),
        "two columns of one name": (
            two_columns("text", "text"),
            "parquet has two columns 'text': rename one",
        ),
    },
    "a.parquet.gz": {"compressed": (b"", r"a\.parquet\.gz is compressed Parquet: decompress it")},
}


@pytest.mark.parametrize("name", ["history.pt", "notes.o", "chapter.a"])
def test_an_ending_that_texts_have_too_is_no_binary_file(tmp_path, name):
    """`.pt` is Portuguese as well as PyTorch's."""
    text = write(tmp_path / "texts" / name, "Era uma vez \u00e0s tr\u00eas")
    write(tmp_path / "texts" / f"weights{text.suffix}", b"PK\0\1")
    assert documents(text) == documents(text.parent) == ["Era uma vez \u00e0s tr\u00eas"]


def test_the_name_of_a_folder_is_no_ending(tmp_path):
    (tmp_path / "old.tsv").mkdir()
    assert documents(write_texts(tmp_path / "old.tsv" / "a.csv", ["one", "two"])) == ["one", "two"]


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in BAD_FILES for case in BAD_FILES[name]])
def test_bad_files_are_named_with_the_place(tmp_path, capfd, name, case):
    content, message = BAD_FILES[name][case]
    with pytest.raises(InputError, match=message) as error:
        documents(write(tmp_path / name, content))
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError, AttributeError])
def test_a_mistake_of_this_program_is_not_called_an_unreadable_file(tmp_path, monkeypatch, error):
    monkeypatch.setattr("gpt.data.corpus.read_documents", Mock(side_effect=error("a mistake")))
    with pytest.raises(error, match="a mistake") as raised:
        documents(write_texts(tmp_path / "a.jsonl", ["text"]))
    assert raised.type is error


def test_a_line_of_json_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt.data.rows.LONGEST_VALUE", 1 << 20)
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "' + b"x" * (64 << 20)))
    with memory_limit(20 << 20), pytest.raises(InputError, match="in line 1: has more than 1 MB"):
        documents(path)


def test_a_value_of_an_array_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt.data.json_array.LONGEST_VALUE", 1 << 20)
    texts = "\n".join(f'{{"text": "{text}"}},' for text in ("a", "x" * (3 << 20)))
    with pytest.raises(InputError, match=r"a\.json in line 2: a value of the array has more than 1 MB$"):
        documents(write(tmp_path / "a.json", f"[{texts}]"))


def test_a_last_line_without_an_end_is_measured_without_what_stands_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt.data.rows.LONGEST_VALUE", 1 << 20)
    texts = ["a" * 200_000, "b" * 1_000_000]
    path = write(tmp_path / "a.jsonl", "\n".join(f'{{"text": "{text}"}}' for text in texts))
    assert documents(path) == texts


def test_a_line_that_is_too_long_is_one_bad_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gpt.data.rows.LONGEST_VALUE", 1 << 20)
    long = '{"text": "' + "x" * (3 << 20) + '"}'
    path = write(tmp_path / "a.jsonl", f'{{"text": "a"}}\n{long}\n{{"text": "b"}}\n{long}')
    assert documents(path, skip_bad_rows=2) == ["a", "b"]
    assert "left out 2 bad rows" in capsys.readouterr().err


def test_size_is_known_for_what_can_be_drawn_from(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt.data.builtin.texts", {"builtin:python-docs": ["abc", "de"]}.__getitem__)
    write(tmp_path / "a.txt", "caf\u00e9")
    write(tmp_path / "b.txt.gz", gzip.compress(b"abc"))
    names = f"{tmp_path}/a.txt", "python-docs", "someone/texts", str(tmp_path)
    assert [find_corpus(name).size() for name in names] == [5, 5, None, None]
    rows = write_rows(tmp_path / "c.parquet", [{"text": "words", "picture": "x" * 9999}])
    assert 5 <= find_corpus(str(rows)).size() < 999
