"""What a name stands for and what is read of it: never silently less or other than given."""

import csv
import gzip
import hashlib
import json
import os
import re
import tracemalloc
from io import StringIO
from itertools import pairwise, zip_longest

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from datasets import load_dataset

from gpt.data.find import find_corpus, recipes
from gpt.data.prepare import prepare
from gpt.data.shards import Prepared
from gpt.data.split import divide_corpus
from gpt.errors import InputError

HELLO = hashlib.sha256(b"hello").hexdigest()


def documents(corpus, **options):
    found = []
    for piece in find_corpus(str(corpus), **options).pieces():
        if piece.first:
            found.append("")
        found[-1] += piece.text
    return found


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def as_jsonl(texts):
    return "".join(json.dumps({"id": i, "text": t}, ensure_ascii=False) + "\n" for i, t in enumerate(texts))


def as_csv(texts, separator=","):
    file = StringIO()
    csv.writer(file, delimiter=separator).writerows([["id", "text"], *enumerate(texts)])
    return file.getvalue()


def test_text_files_are_documents_byte_for_byte(tmp_path):
    texts = {"a.txt": "one\r\ntwo\rthree\n", "b/c.md": "caf\u00e9 \u4e2d\n\n"}
    for name, text in {**texts, ".hidden": "no", "b/.git/x": "no", "empty.txt": ""}.items():
        write(tmp_path / "texts" / name, text)
    (tmp_path / "texts" / "link").symlink_to(write(tmp_path / "elsewhere" / "d.txt", "third").parent)
    assert documents(tmp_path / "texts") == [*texts.values(), "third"]
    assert documents(tmp_path / "texts" / "a.txt") == [texts["a.txt"]]
    assert documents(tmp_path / "texts" / "**" / "*.md") == [texts["b/c.md"]]


def test_every_format_gives_the_same_documents(tmp_path, texts):
    jsonl = as_jsonl(texts).encode()
    files = {
        "a.jsonl": jsonl,
        "b.JSON.GZ": gzip.compress(jsonl),
        "d.csv": as_csv(texts).encode(),
        "e.tsv": as_csv(texts, "\t").encode(),
    }
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), tmp_path / "f.parquet")
    for name, content in files.items():
        write(tmp_path / name, content)
    for name in (*files, "f.parquet"):
        assert documents(tmp_path / name) == texts, name


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a[1].jsonl", "a::b.jsonl"])
def test_texts_that_look_like_something_else_stay_texts(tmp_path, name):
    """The only value of a column, so that a reader which guesses types has no counterexample."""
    write(tmp_path / "a1.jsonl", '{"text": "of another file"}')  # which the pattern a[1] matches
    for text in ("NA", "None", "null", "007", "1.10", "true", "2021-05-05", "[1]", "caf\u00e9"):
        content = as_csv([text] * 2, "\t" if "tsv" in name else ",")
        if "json" in name:
            content = as_jsonl([text] * 2)
        for mark in (b"", b"\xef\xbb\xbf"):  # a byte order mark, as Windows writes it
            assert documents(write(tmp_path / name, mark + content.encode())) == [text] * 2


def test_columns(tmp_path):
    path = write(
        tmp_path / "a.jsonl", '{"id": 5, "body": "x"}\n{"body": null}\n{"body": ""}\n\n{"body": "y"}'
    )
    assert documents(path, text_column="body") == ["x", "y"]
    with pytest.raises(InputError, match=r"a.jsonl has no column 'text', it has id, body"):
        documents(path)
    with pytest.raises(InputError, match=r"a.jsonl in line 1: column 'id' holds int, expected text"):
        documents(path, text_column="id")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"text": "x"}\n\n{"text": \n',
            r"a\.jsonl in line 3: is no JSON, Expecting value in column 1: expected an object on each line",
        ),
        ("a.jsonl", '{"text": "x"}\n7\n', r"a\.jsonl in line 2: expected an object, got 7; leave out"),
        ("a.jsonl", '{"text": "x"}\n{"text": 5}', r"a\.jsonl in line 2: column 'text' holds int"),
        ("a.jsonl", f'{{"text": {"7" * 5000}}}', r"a\.jsonl in line 1: Exceeds the limit .*digits"),
        ("a.json", "[" * 100_000, r"a\.json is nested too deeply$"),
        ("a.jsonl", '{"text": ' + "[" * 100_000, r"a\.jsonl in line 1: is nested too deeply"),
        ("a.json", '[\n {"text": "x"},\n {"text" 5}]', r"in line 3: the array is no JSON, Expecting ':'"),
        ("a.json", '[\n {"text": "x"},\n {"text":', r"in line 3: the array is no JSON, Expecting value"),
        ("a.json", '[\n{"text": "x"}, 7]', r"in line 2: expected an object, got 7"),
        ("a.json", '[{"text": "x"}]\n{"text": "y"}', r"in line 1: text follows the end of the array"),
        ("a.csv", "id,text\n1,x\n2,y,z\n", r"a\.csv in line 3: it has more values than the header"),
        ("a.csv", 'id,text\n1,"x\n2,y\n', r"a\.csv in line 3: unexpected end of data"),
        ("a.parquet", '{"text": "unfinished', r"cannot read .*a\.parquet"),
        ("a.csv.gz", "text", r"cannot read .*a\.csv\.gz \(BadGzipFile"),
        ("a.txt.gz", gzip.compress(b"text" * 999)[:-9], r"cannot read .*a\.txt\.gz \(EOFError"),
        (
            "a.txt",
            b"a caf\xe9",
            r"byte 5 cannot be decoded; iconv -f WINDOWS-1252 -t UTF-8 .*a.txt > .*a-utf8.txt",
        ),
        (
            "a b.txt",
            "\u043c\u0438\u0440 ".encode("koi8-r") * 9,
            r"byte 0 .*; iconv -f ENCODING -t UTF-8 '.*a b.txt'",
        ),
        ("a.txt", "text".encode("utf-16-le"), "seems to be UTF-16LE .*: iconv -f UTF-16LE -t UTF-8"),
        ("a.csv", "text,id\n".encode("utf-16-be"), "seems to be UTF-16BE .*: iconv -f UTF-16BE -t UTF-8"),
        ("a.txt", b"some text \0 and more", "a.txt is binary: expected text, JSON lines"),
        ("a.png", b"text", "a.png is binary: expected text"),
        ("a.pyc", b"text", "a.pyc is binary: expected text"),
        ("a.txt.gz", gzip.compress(b"some text \0 and more"), "a.txt.gz is binary: expected text"),
        ("a.txt", ("\u00e9\n" * 300_000).encode() + b"\xff", "is not UTF-8 text: byte 900000 "),
        ("a.jsonl", as_jsonl(["fine", "caf\u00e9"]).encode("latin-1"), "is not UTF-8 text: byte 48 "),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "-",
)
def test_bad_files_are_named_with_the_place(tmp_path, capfd, name, content, message):
    with pytest.raises(InputError, match=message) as error:
        documents(write(tmp_path / name, content))
    assert "\n" not in str(error.value) and capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["a.gz", "a.json.gz"])
def test_what_a_compressed_file_holds_is_bounded(tmp_path, monkeypatch, name):
    """A text is read in parts, a line of JSON has a limit."""
    monkeypatch.setattr("gpt.data.rows.LONGEST_VALUE", 1 << 20)
    path = write(tmp_path / name, gzip.compress(("[" if "json." in name else " ").encode() * (64 << 20)))
    tracemalloc.start()
    try:
        if "json" in name:
            with pytest.raises(InputError, match=r"in line 1: is no JSON|is nested too deeply"):
                documents(path)
        else:
            assert sum(len(piece.text) for piece in find_corpus(str(path)).pieces()) == 64 << 20
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_names_that_lead_nowhere(tmp_path):
    (tmp_path / "void").mkdir()
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    for name, message in (
        ("novel.txt", r"no corpus 'novel.txt'.*python-docs, python-stdlib"),
        (f"{tmp_path}/brokn.txt", rf"no corpus '{tmp_path}/brokn.txt': did you mean {tmp_path}/broken.txt\?"),
        (f"{tmp_path}/void.d/novel.txt", "expected a text file"),
        ("", "no corpus ''"),
        (f"{tmp_path}/*.csv", "no file matches"),
        (f"{tmp_path}/void", "no file matches"),
        (f"{tmp_path}/*.txt", r"broken\.txt is not a file, or a link to one that is missing"),
        ("reference://x", "expected a path, or a URL of https, http, s3, gs, hf$"),
    ):
        with pytest.raises(InputError, match=message):
            find_corpus(name)
    write(tmp_path / "void" / "a.txt", "")
    with pytest.raises(InputError, match="is empty"):
        prepare(str(tmp_path / "void"))
    write(tmp_path / "void" / "a.txt", "text")
    write(tmp_path / "void" / "b.jsonl", '{"text": "row"}')
    with pytest.raises(
        InputError, match=r"mixes files of rows \(.*b.jsonl\) with texts \(.*a.txt\).*\.jsonl'"
    ):
        find_corpus(str(tmp_path / "void"))


@pytest.mark.skipif(os.name == "nt", reason="POSIX file names")
def test_a_file_name_that_is_not_utf8(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.txt")
    with open(path, "wb") as file:
        file.write(b"some text")
    counts = Prepared(prepare(os.fsdecode(path), vocab_size=300)).counts
    assert counts["train"].bytes + counts["val"].bytes == 9


@pytest.fixture
def hub(tmp_path, texts, monkeypatch):
    """A data set laid out as the hub lays them out: two configurations, Parquet shards, a card."""
    card = "---\nconfigs:\n"
    for name in ("plain", "other"):
        card += f"- config_name: {name}\n  data_files: [{{split: train, path: {name}/train-*}}]\n"
    write(tmp_path / "owner" / "name" / "README.md", card + "---\n# A card\n")
    shards = {"plain/train-00000-of-00002": texts[:20], "plain/train-00001-of-00002": texts[20:]}
    for name, part in {**shards, "other/train-00000-of-00001": ["other"]}.items():
        path = tmp_path / "owner" / "name" / f"{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": part, "url": ["u"] * len(part)}), path)
    recipe = "corpus: {files: 'hub:owner/name', subset: plain}"
    monkeypatch.chdir(tmp_path)  # where `datasets` finds it without the network
    return write(tmp_path / "of-the-hub.yaml", recipe)


def test_hub_data_sets(hub, texts):
    assert find_corpus("someone/texts").files == ("hub:someone/texts",)
    assert documents(hub) == documents("owner/name/plain") == texts
    with pytest.raises(InputError, match="no corpus 'owner/nothing'"):
        find_corpus("owner/nothing")
    with pytest.raises(
        InputError, match=r"no column 'body', it has text, url: choose one with --text_column"
    ):
        documents(hub, text_column="body")
    with pytest.raises(InputError, match=r"cannot read .*owner/name.*missing"):
        documents(write(hub.with_name("missing.yaml"), "corpus: {files: 'hub:owner/name', subset: missing}"))


def test_a_corpus_file_asks_the_hub_for_its_revision(hub, monkeypatch):
    asked = []

    def load(*names, original=load_dataset, **options):
        asked.append(options.pop("revision"))
        return original(*names, **options)

    monkeypatch.setattr("datasets.load_dataset", load)
    recipe = "corpus: {files: 'hub:owner/name', subset: other, revision: 'v2'}"
    assert documents(write(hub.with_name("v2.yaml"), recipe)) == ["other"]
    documents(hub)
    assert asked == ["v2", None]


def test_corpus_files_describe_themselves(monkeypatch):
    monkeypatch.setattr("gpt.data.find._download", lambda url, sha256: url)
    assert {"python-docs", "python-stdlib", "tinyshakespeare", "tinystories", "fineweb-edu"} <= set(recipes())
    for name, path in recipes().items():
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"about", "source", "licence", "size", "corpus"} <= set(recipe), name
        found = find_corpus(name)
        assert found.files, name
        for file, expected in zip_longest(found.files, found.sha256):  # what it names stays what it is
            assert file.startswith("builtin:") or re.fullmatch("[0-9a-f]{40,64}", expected or found.revision)
    assert find_corpus("fineweb-edu").subset == "sample-10BT"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [x]\ncorpus: {files: *a}", "an alias"),
        ("#" * 70_000, "more than 65,536 bytes"),
        ("corpus: {file: x}", r"expected files, subset, .* got .*'file'"),
        ("- a", "needs a mapping"),
        ("a: " + "[" * 10_000, "recursion"),
        ("corpus: {files: [1, a.txt]}", "expected tuple"),
        ("corpus: {files: 'hub:a/b', revision: 1234567}", "revision is 1234567, expected str"),
        ("corpus: {files: a.txt, sha256: abc}", "sha256 is 'abc', expected 64 hexadecimal digits"),
        (f"corpus: {{files: a.txt, sha256: [{HELLO}, {HELLO}]}}", "2 values for 1 file"),
        ("corpus: {files: [a.txt, b.txt], weights: 0.5}", "weights has 1 value for 2 files"),
        ("corpus: {files: a.txt, weights: 2}", "weights has 2, expected the share of a file .* at most 1"),
        ("corpus: {files: a.txt, weights: 0}", "weights has 0, expected the share of a file .* above 0"),
        ("corpus: {files: a.txt, weights: .nan}", "weights is .*nan"),
        ("corpus: {files: a.txt, weights: half}", "expected tuple"),
        ("corpus: {files: [a.txt, a.txt], weights: [1, 0.5]}", "a file is named twice"),
    ],
)
def test_corpus_files_that_are_none(tmp_path, text, message):
    with pytest.raises(InputError, match=f"not a corpus file.*{message}"):
        find_corpus(str(write(tmp_path / "mine.yaml", text)))


def test_a_url_is_downloaded_once(tmp_path, far_files):
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"from afar\r\n"))
    url = f"s3://{path}?download=1"
    with pytest.raises(InputError, match=r"cannot read s3://.*nothing\.txt"):
        find_corpus(f"s3://{tmp_path}/nothing.txt")
    path.rename(f"{path}?download=1")
    assert documents(url) == ["from afar\r\n"]
    (tmp_path / "a.txt.gz?download=1").unlink()
    recipe = write(tmp_path / "far.yaml", f"corpus: {{files: ['{url}']}}")
    assert documents(recipe) == ["from afar\r\n"]
    assert not list((tmp_path / "cache").rglob("nothing*"))


def test_a_corpus_file_says_what_its_files_hold(tmp_path, far_files):
    """What differs is named with both hashes, as it comes and in the cache; nothing of it is kept."""
    far = write(tmp_path / "a.txt", "hello")
    recipe = write(tmp_path / "far.yaml", f"corpus: {{files: 's3://{far}', sha256: {HELLO}}}")
    write(far, "evil")
    evil = hashlib.sha256(b"evil").hexdigest()
    with pytest.raises(
        InputError, match=f"^s3://{far} has the SHA-256 {evil}, the corpus file expects {HELLO}"
    ):
        find_corpus(str(recipe))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    write(far, "hello")
    assert documents(recipe) == ["hello"]
    (kept,) = (tmp_path / "cache").rglob("a.txt")
    write(kept, "evil")
    with pytest.raises(
        InputError, match=rf"^delete {kept} .*SHA-256 {evil}, the corpus file expects {HELLO}"
    ):
        find_corpus(str(recipe))
    write(recipe, f"corpus: {{files: ['{far}', 's3://{far}'], sha256: [{HELLO}, {HELLO}]}}")
    kept.unlink()
    assert documents(recipe) == ["hello", "hello"]
    write(far, "other")
    with pytest.raises(InputError, match=f"{far} has the SHA-256 .*, the corpus file expects {HELLO}"):
        find_corpus(str(recipe))


def test_the_name_of_a_url_may_be_long(tmp_path, far_files):
    far = write(tmp_path / ("\u4e2d" * 82 + ".jsonl"), '{"text": "hello"}')
    assert documents(f"s3://{far}") == ["hello"]


def test_size_is_known_for_what_can_be_drawn_from(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt.data.builtin.texts", {"builtin:python-docs": ["abc", "de"]}.__getitem__)
    write(tmp_path / "a.txt", "caf\u00e9")
    write(tmp_path / "b.txt.gz", gzip.compress(b"abc"))
    assert find_corpus(str(tmp_path / "a.txt")).size() == 5
    assert find_corpus(str(tmp_path)).size() is find_corpus("someone/texts").size() is None
    assert find_corpus("python-docs").size() == 5


def weighted(folder, names, weights):
    """A corpus file of these files with these weights."""
    files = [str(folder / name) for name in names]
    return write(folder / "mine.yaml", json.dumps({"corpus": {"files": files, "weights": weights}}))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz", "a.json"])
def test_a_weight_is_the_share_of_the_rows_that_is_read(tmp_path, name):
    """Spread over all of them, the same each time; all of the other file."""
    old = [f"{i:03} old" for i in range(400)]
    write(tmp_path / "new.jsonl", as_jsonl(["new 1", "new 2"]))
    if name == "a.parquet":
        pq.write_table(pa.table({"text": old}), tmp_path / name)
    elif name == "a.json":
        write(tmp_path / name, json.dumps([{"text": text} for text in old]))
    else:
        content = (as_csv(old) if name == "a.csv" else as_jsonl(old)).encode()
        write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    recipe = weighted(tmp_path, ["new.jsonl", name], [1, 0.25])
    found = documents(recipe)
    assert found == documents(recipe)
    assert found[:2] == ["new 1", "new 2"]
    places = [old.index(text) for text in found[2:]]
    assert places == sorted(set(places)) and abs(len(places) - 100) <= 1
    assert max(b - a for a, b in pairwise([*places, 400])) <= 5
    assert set(found) <= set(documents(weighted(tmp_path, ["new.jsonl", name], [1, 0.5])))


@pytest.mark.parametrize("lines", [600, 60_000])
def test_a_weight_is_the_share_of_the_passages_of_a_text(tmp_path, lines):
    """A passage is a document of its own, unless it follows one that is read."""
    text = "".join(f"{i:06} line\n" for i in range(lines))
    write(tmp_path / "a.txt", text)
    found = documents(weighted(tmp_path, ["a.txt"], [0.25]))
    assert found == documents(weighted(tmp_path, ["a.txt"], [0.25]))
    assert sum(map(len, found)) / len(text) == pytest.approx(0.25, abs=0.06)
    places = [text.index(document) for document in found]
    assert places[0] == 0 and places == sorted(places)
    assert places[-1] > 0.8 * len(text)
    ends = [place + len(document) for place, document in zip(places, found, strict=True)]
    assert all(end < place for end, place in zip(ends, places[1:], strict=False))
    assert documents(weighted(tmp_path, ["a.txt"], [1])) == [text]


def test_a_file_with_a_weight_is_never_left_out(tmp_path):
    write(tmp_path / "a.jsonl", as_jsonl(["only"]))
    write(tmp_path / "b.txt", "few words")
    first, second = documents(weighted(tmp_path, ["a.jsonl", "b.txt"], [0.01, 0.01]))
    assert first == "only" and second and "few words".startswith(second)


def test_sizes_count_by_weight(tmp_path):
    """Also where a part of the text is read, and where the size is estimated."""
    line = "ten bytes\n"
    write(tmp_path / "old.txt", line * 400_000)
    write(tmp_path / "new.txt", "new words\n" * 100_000)
    corpus = find_corpus(str(weighted(tmp_path, ["new.txt", "old.txt"], [1, 0.25])))
    assert corpus.size() == 2_000_000
    read = {word: sum(piece.text.count(word) for piece in corpus.pieces()) for word in ("new", "ten")}
    assert read == {"new": 100_000, "ten": pytest.approx(100_000, rel=0.05)}
    drawn = [piece.text for piece in corpus.pieces(1_000_000)]
    assert sum(map(len, drawn)) == pytest.approx(1_000_000, rel=0.4)
    assert {text[:3] for text in drawn} >= {"new"}
    write(tmp_path / "c.gz", gzip.compress(line.encode() * 1000))
    corpus = find_corpus(str(weighted(tmp_path, ["c.gz"], [0.25])))
    assert corpus.size() is None and corpus.estimated_size(0, 0) == 2500


def test_prepared_data_and_plans_know_the_weights(tmp_path):
    write(tmp_path / "old.txt", "".join(f"{i} of the old lines\n" for i in range(20_000)))
    write(tmp_path / "new.txt", "".join(f"{i} of the new lines\n" for i in range(5_000)))
    sizes = {}
    for weight in (0.25, 0.5):
        recipe = str(weighted(tmp_path, ["new.txt", "old.txt"], [1, weight]))
        folder = prepare(recipe, vocabulary="gpt2:300")
        assert prepare(recipe, vocabulary="gpt2:300") == folder
        counts = Prepared(folder).counts
        sizes[folder] = sum(counts[split].bytes for split in ("train", "val"))
        assert divide_corpus(find_corpus(recipe)).size == sizes[folder]
        assert sizes[folder] == pytest.approx(find_corpus(recipe).size(), rel=0.05)
    assert len(sizes) == 2


def test_nothing_that_is_held_out_is_trained_on_beside_a_weight(tmp_path):
    write(tmp_path / "old.txt", "".join(f"{i:06} of the old lines\n" for i in range(60_000)))
    source = find_corpus(str(weighted(tmp_path, ["old.txt"], [0.6])))
    lines = {split: set() for split in ("train", "val")}
    for piece in divide_corpus(source).pieces():
        lines[piece.split].update(re.findall(r"\d{6} of the old lines", piece.text))
    assert len(lines["val"]) > 1000 and not lines["train"] & lines["val"]
