import gzip
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt.data.corpus import Corpus, find_corpus, recipes
from gpt.data.prepare import prepare
from gpt.errors import InputError


def documents(corpus, **options):
    found = []
    for piece in find_corpus(corpus, **options).pieces():
        if piece.first:
            found.append("")
        found[-1] += piece.text
    return found


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def as_jsonl(texts, column="text"):
    return "".join(json.dumps({"id": i, column: t}, ensure_ascii=False) + "\n" for i, t in enumerate(texts))


def as_csv(texts, separator=","):
    lines = ["id" + separator + "text"]
    lines += [f'{i}{separator}"' + text.replace('"', '""') + '"' for i, text in enumerate(texts)]
    return "\n".join(lines) + "\n"


def test_text_files_are_documents_byte_for_byte(tmp_path):
    texts = {
        "a.txt": "one\r\ntwo\rthree\n",
        "b/c.md": "caf\u00e9 \u4e2d\n\n",
        ".hidden": "no",
        "b/.git/x": "no",
    }
    for name, text in texts.items():
        write(tmp_path / "texts" / name, text)
    assert list(documents(str(tmp_path / "texts"))) == [texts["a.txt"], texts["b/c.md"]]
    assert list(documents(str(tmp_path / "texts" / "a.txt"))) == [texts["a.txt"]]
    assert list(documents(str(tmp_path / "texts" / "**" / "*.md"))) == [texts["b/c.md"]]


def test_every_format_gives_the_same_documents(tmp_path, texts):
    import zstandard

    table = pa.table({"id": list(range(len(texts))), "text": texts})
    jsonl = as_jsonl(texts).encode()
    write(tmp_path / "a.jsonl", jsonl)
    write(tmp_path / "list.json", json.dumps([{"text": text} for text in texts]))
    write(tmp_path / "b.jsonl.gz", gzip.compress(jsonl))
    write(tmp_path / "c.jsonl.zst", zstandard.compress(jsonl))
    write(tmp_path / "d.csv", as_csv(texts))
    write(tmp_path / "e.tsv", as_csv(texts, "\t"))
    pq.write_table(table, tmp_path / "f.parquet", row_group_size=7)
    for name in ("a.jsonl", "list.json", "b.jsonl.gz", "c.jsonl.zst", "d.csv", "e.tsv", "f.parquet"):
        assert list(documents(str(tmp_path / name))) == texts, name


def test_an_array_of_json_is_read_value_by_value(tmp_path, monkeypatch):
    """Of any length and over any lines, with one value in memory."""
    import tracemalloc

    rows = [{"text": f"{i}, [{{" + 'a "quoted" text ' * (i % 50)} for i in range(3000)]
    path = write(tmp_path / "a.json.gz", gzip.compress(("\ufeff \n" + json.dumps(rows, indent=1)).encode()))
    monkeypatch.setattr("gpt.data.formats.PART_BYTES", 1000)
    assert list(documents(str(path))) == [row["text"] for row in rows]
    monkeypatch.setattr("gpt.data.formats.PART_BYTES", 1 << 18)
    write(path, gzip.compress(b"[" + b'{"text":\n"some words"},' * 200_000 + b'{"text": ""}]'))
    tracemalloc.start()
    assert sum(1 for _ in find_corpus(str(path)).pieces()) == 200_001
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 20  # of 5 MB
    monkeypatch.setattr("gpt.data.formats._LONGEST_LINE", 1000)
    monkeypatch.setattr("gpt.data.formats.PART_BYTES", 500)
    for text in ('[{"text": "' + "x" * 2000 + '"}]', '[{"text": "x"}, {"text": ', '[{"text": "x"}, oops]'):
        write(path, gzip.compress(text.encode()))
        with pytest.raises(InputError, match=r"not an array of JSON from value [12] on, .* 1,000 characters"):
            list(documents(str(path)))


def test_compressed_text(tmp_path):
    import zstandard

    text = "a poem\r\n" * 1000
    write(tmp_path / "a.txt.gz", gzip.compress(text.encode()))
    write(tmp_path / "b.zst", zstandard.compress(text.encode()))
    assert list(documents(str(tmp_path / "a.txt.gz"))) == list(documents(str(tmp_path / "b.zst"))) == [text]


@pytest.fixture
def hub(tmp_path, texts, monkeypatch):
    """A data set laid out as the hub lays them out: two configurations, Parquet shards, a card."""
    card = """---
configs:
- config_name: plain
  data_files: [{split: train, path: plain/train-*}, {split: validation, path: plain/validation-*}]
- config_name: lines
  data_files: [{split: train, path: lines/train-*}]
---
# A card
"""
    write(tmp_path / "owner" / "name" / "README.md", card)
    write(tmp_path / "owner" / "name" / ".gitattributes", "*.parquet filter=lfs")
    shards = {
        "plain/train-00000-of-00002": texts[:20],
        "plain/train-00001-of-00002": texts[20:30],
        "plain/validation-00000-of-00001": texts[30:],
        "lines/train-00000-of-00001": [
            "",
            " = One = \n",
            "",
            " first \n",
            " = = Part = = \n",
            " = Two = \n",
            " x \n",
        ],
    }
    for name, part in shards.items():
        path = tmp_path / "owner" / "name" / f"{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": part, "url": ["u"] * len(part)}), path)
    (tmp_path / "of-the-hub.yaml").write_text("corpus: {hub: owner/name}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)  # where `datasets` finds it without the network
    return tmp_path / "owner" / "name"


def test_a_name_with_one_slash_is_of_the_hub_unless_it_is_here(hub):
    assert find_corpus("someone/texts").files == ("hub:someone/texts",)
    assert all(name.startswith("owner/name/plain/") for name in find_corpus("owner/name/plain").files)
    with pytest.raises(InputError, match="no corpus 'owner/nothing'"):
        find_corpus("owner/nothing")


@pytest.mark.parametrize("streaming", [True, False])
def test_hub_data_sets_by_configuration_and_split(hub, texts, streaming):
    name = "of-the-hub.yaml"
    assert list(documents(name, subset="plain", streaming=streaming)) == texts[:30]
    assert list(documents(name, subset="plain", split="validation", streaming=streaming)) == texts[30:]


def test_the_revision_of_a_hub_data_set_is_asked_for(monkeypatch, tmp_path):
    import datasets

    asked, rows = [], datasets.Dataset.from_list([{"text": "some words"}] * 9).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **how: asked.append(how["revision"]) or rows)
    recipe = write(tmp_path / "pinned.yaml", "corpus:\n  hub: owner/name\n  revision: v2\n")
    prepare(str(recipe), vocab_size=300, val_fraction=0.0)
    assert set(asked) == {"v2"}


def test_lines_of_a_hub_data_set_become_documents(hub):
    found = list(documents("of-the-hub.yaml", subset="lines", document_starts=" = [^=]"))
    assert found == ["", " = One = \n first \n = = Part = = \n", " = Two = \n x \n"]


def test_a_folder_with_rows_leaves_its_card_out(hub, texts):
    assert list(documents(str(hub / "plain"))) == texts
    assert not any("card" in name for name in find_corpus(str(hub)).files)


def test_hub_errors_name_what_is_there(hub):
    with pytest.raises(
        InputError, match=r"no column 'body', it has text, url: choose one with --text_column"
    ):
        list(documents("of-the-hub.yaml", subset="plain", text_column="body"))
    with pytest.raises(InputError, match=r"cannot read owner/name.*test"):
        list(documents("of-the-hub.yaml", subset="plain", split="test"))


def test_text_column(tmp_path):
    path = write(tmp_path / "a.jsonl", as_jsonl(["x", "y"], column="body"))
    assert list(documents(str(path), text_column="body")) == ["x", "y"]
    with pytest.raises(InputError, match=r"a.jsonl has no column 'text', it has id, body"):
        list(documents(str(path)))
    with pytest.raises(InputError, match=r"a.jsonl in row 1: column 'id' holds int, expected text"):
        list(documents(str(path), text_column="id"))


def test_a_blank_after_the_comma_of_two_columns(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"question": "x", "answer": "y"}')
    found = list(documents(str(path), text_column="question, answer"))
    assert found == list(documents(str(path), text_column="question,answer"))


def test_a_broken_link_that_a_pattern_matches_is_an_error(tmp_path):
    write(tmp_path / "a.txt", "x")
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"b\.txt is not a file, or a link to one that is missing"):
        find_corpus(str(tmp_path / "*.txt"))


def test_missing_texts_are_empty_documents(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one"}\n{"text": null}\n{"text": ""}\n')
    assert list(documents(str(path))) == ["one", "", ""]


TEXTS = ["NA", "None", "null", "007", "1.10", "true", "2021-05-05", "[1]", "caf\u00e9"]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a[1].jsonl", "a::b.jsonl"])
def test_texts_that_look_like_something_else_stay_texts(tmp_path, name):
    """Alone in a column, so that a reader which guesses types has no counterexample."""
    write(tmp_path / "a1.jsonl", '{"text": "of another file"}')  # which the pattern a[1] matches
    for text in TEXTS:
        content = as_csv([text] * 2, "\t" if "tsv" in name else ",")
        if "json" in name:
            content = as_jsonl([text] * 2) if name.endswith("l") else json.dumps([{"text": text}, text])
        for mark in (b"", b"\xef\xbb\xbf"):  # a byte order mark, as Windows writes it
            path = write(tmp_path / name, mark + content.encode())
            assert list(documents(str(path))) == [text] * 2


def test_rows_of_several_types(tmp_path, capfd):
    path = write(tmp_path / "a.jsonl", as_jsonl(["a text", "another"]) + '{"text": 5}\n')
    with pytest.raises(InputError, match=r"a\.jsonl in row 3: column 'text' holds int, expected text"):
        list(documents(str(path)))
    asked, reply = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
    for chat in ([asked, reply], [asked, {**reply, "name": "bot"}]):  # other keys are not read
        with open(path, "a" if len(chat[1]) > 2 else "w", encoding="utf-8") as file:
            file.write(json.dumps({"messages": chat}) + "\n")
    first, second = documents(str(path))
    assert first == second and first.endswith("Yes")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n\n{"text": \n', r"a\.jsonl is not JSON from line 3 on: Expecting value"),
        ("a.jsonl", '{"text": "x"}\n7\n', r"a\.jsonl in line 2: expected an object, got 7"),
        ("a.json", "[" * 100_000, r"cannot read .*a\.json \(RecursionError"),
        ("a.csv", "id,text\n1,x\n2,y,z\n", r"a\.csv in line 3: expected 2 values, got 3"),
        ("a.csv", 'id,text\n1,"x\n2,y\n', r"a\.csv in line 3: unexpected end of data"),
    ],
)
def test_bad_rows_are_named_by_their_line(tmp_path, capfd, name, content, message):
    with pytest.raises(InputError, match=message):
        list(documents(str(write(tmp_path / name, content))))
    assert capfd.readouterr().err == ""  # nothing beside the one line


def test_what_is_not_utf8_is_named_with_its_byte(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt.data.formats.PART_BYTES", 64)
    monkeypatch.setattr("gpt.data.formats._LOOKED_AT", 8)
    position = 1000
    bad = ("\u00e9" * 500).encode() + b"\xff" + b"tail"
    path = write(tmp_path / "latin.txt", bad)
    with pytest.raises(InputError, match=rf"latin.txt is not UTF-8: byte {position} .*--errors replace"):
        list(documents(str(path)))
    assert list(documents(str(path), errors="replace")) == ["\u00e9" * 500 + "\ufffdtail"]
    half = write(tmp_path / "half.txt", "ab\u4e2d".encode()[:-1])
    with pytest.raises(InputError, match="byte 2"):
        list(documents(str(half)))


def test_rows_that_are_not_utf8_are_named_with_their_byte(tmp_path):
    rows = as_jsonl(["fine", "caf\u00e9"]).encode("latin-1")
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(InputError, match=rf"a.jsonl is not UTF-8: byte {rows.index(0xE9)} "):
        list(documents(str(path)))
    assert list(documents(str(path), errors="replace")) == ["fine", "caf\ufffd"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv.gz"])
def test_files_that_are_not_what_their_name_says(tmp_path, name):
    path = write(tmp_path / name, b'{"text": "unfinished')
    with pytest.raises((InputError, OSError), match=r"a\.|gzip"):
        list(documents(str(path)))


def test_names_that_lead_nowhere(tmp_path):
    with pytest.raises(InputError, match=r"no corpus 'novel.txt'.*python-docs, python-stdlib"):
        find_corpus("novel.txt")
    for name in ("", "~nobody-of-this-name/a.txt"):
        with pytest.raises(InputError, match=f"no corpus '{name}'"):
            find_corpus(name)
    with pytest.raises(InputError, match="no file matches"):
        find_corpus(str(tmp_path / "*.txt"))
    (tmp_path / "void").mkdir()
    with pytest.raises(InputError, match="no file matches"):
        find_corpus(str(tmp_path / "void"))
    write(tmp_path / "void" / "a.txt", "")
    with pytest.raises(InputError, match="is empty"):
        prepare(str(tmp_path / "void"))
    with pytest.raises(InputError, match="needs files, hub or builtin"):
        Corpus()
    with pytest.raises(InputError, match="strict or replace"):
        find_corpus("python-docs", errors="ignore")


def test_recipes_describe_themselves():
    import yaml

    names = {
        "python-docs",
        "python-stdlib",
        "tinyshakespeare",
        "the-verdict",
        "tinystories",
        "openwebtext",
        "wikitext-103",
        "fineweb-edu",
    }
    assert set(recipes()) == names
    for name, path in recipes().items():
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"about", "source", "licence", "size", "corpus"} <= set(recipe), name
        find_corpus(name).fingerprint()
    assert find_corpus("fineweb-edu").subset == "sample-10BT"


def test_own_recipes(tmp_path):
    write(tmp_path / "a.txt", "text")
    recipe = write(tmp_path / "mine.yaml", f"corpus: {{files: ['{tmp_path}/a.txt'], errors: replace}}")
    assert find_corpus(str(recipe)) == Corpus(files=(f"{tmp_path}/a.txt",), errors="replace")
    assert find_corpus(str(recipe), errors="strict").errors == "strict"
    for text, message in (
        (
            "corpus: {files: 'reference://x'}",
            "expected a path, or a URL of https, http, s3, gs, hf without ::",
        ),
        ("corpus: {files: 'https://x::file://y'}", "expected a path, or a URL"),
        ("corpus: {hub: ../private}", "expected OWNER/NAME of a data set"),
        ("a: &a [x]\ncorpus: {files: *a}", "not a recipe.*an alias"),
        ("#" * 70_000, "not a recipe.*more than 65,536 bytes"),
        ("corpus: {file: x}", r"not a recipe.*expected files, subset, .* got .*'file'"),
        ("- a", "not a recipe"),
        ("a: [", "not a rec"),
        ("a: " + "[" * 10_000, "not a rec"),
        ("corpus: {hub: a/b, document_starts: '('}", "not a recipe.*unterminated"),
        ("corpus: {hub: a/b, document_starts: 5}", "not a recipe"),
        ("corpus: {1: x}", "not a recipe.*expected files, subset"),
        ("corpus: {files: [1, a.txt]}", "not a recipe.*1 is not a file"),
        ("corpus: {files: }", "not a recipe"),
        ("corpus: {files: ''}", "not a recipe.* is not a file"),
        ("corpus: {builtin: [python-docs]}", "not a recipe.*unknown built-in corpus"),
        ("corpus: {hub: a/b, revision: 1234567}", "not a recipe.*revision is 1234567, expected str"),
    ):
        write(recipe, text)
        with pytest.raises(InputError, match=message):
            find_corpus(str(recipe))


def test_the_fingerprint_is_of_the_content(tmp_path):
    a, b = write(tmp_path / "a.txt", "text"), write(tmp_path / "b.txt", "text")
    c, d = write(tmp_path / "c.txt", "Text"), write(tmp_path / "d.jsonl", "text")
    prints = [find_corpus(str(path)).fingerprint() for path in (a, b, c, d)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert find_corpus(str(a), errors="replace").fingerprint() != prints[0]


def run(code, *arguments, options=()):
    command = [sys.executable, *options, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)


@pytest.mark.slow
def test_every_open_names_its_encoding(tmp_path):
    files = [
        write(tmp_path / "a.txt", "caf\u00e9 " * 300),
        write(tmp_path / "b.jsonl", as_jsonl(["caf\u00e9"] * 300)),
        write(tmp_path / "c.csv", as_csv(["caf\u00e9"] * 300)),
        recipes()["python-docs"],
    ]
    code = r"""
import sys, warnings
warnings.filterwarnings("error", category=EncodingWarning, module=r"gpt(\.|$)")
from gpt.data import builtin
from gpt.data.prepare import prepare
builtin._source_files = lambda original=builtin._source_files: original()[:9]  # some of Python's own files
for name in sys.argv[1:]:
    prepare(name, vocab_size=300)
"""
    done = run(code, *files, options=["-X", "warn_default_encoding"])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_prepared_data_needs_neither_datasets_nor_network(tmp_path):
    path = write(tmp_path / "a.jsonl", as_jsonl(["some text to train on"] * 300))
    prepare(str(path), vocab_size=300)
    code = """
import sys, socket
from gpt.data.module import TokenData
assert "datasets" not in sys.modules
sys.modules["datasets"] = socket.socket = None
data = TokenData(sys.argv[1], vocab_size=300, context_length=16)
data.prepare_data()
data.setup("fit")
print(next(iter(data.train_dataloader()))[0].shape)
"""
    done = run(code, path)
    assert done.stdout == "torch.Size([12, 16])\n", done.stderr


def test_size_is_known_for_plain_text_alone(tmp_path):
    write(tmp_path / "a.txt", "caf\u00e9")
    write(tmp_path / "b.txt.gz", gzip.compress(b"abc"))
    assert find_corpus(str(tmp_path / "a.txt")).size() == 5
    assert find_corpus(str(tmp_path)).size() is None
    assert find_corpus("python-docs").size() is None


def test_urls_are_read_and_known_by_their_name(tmp_path, far_files):
    path = write(tmp_path / "a.txt", "from afar\r\n")
    url = f"s3://{path}"
    assert list(documents(url)) == ["from afar\r\n"]
    assert find_corpus(url).size() is None
    first = prepare(url, vocab_size=300)
    write(path, "changed")
    assert prepare(url, vocab_size=300) == first
    path.unlink()
    assert prepare(url, vocab_size=300) == first
    with pytest.raises(InputError, match=r"a\.txt.*check the address and the network, or download"):
        prepare(url, vocab_size=301)
