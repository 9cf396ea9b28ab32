"""Corpora that are damaged, mixed, misnamed or changing: never silently less or other than given."""

import gzip
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from gpt.data import writer
from gpt.data.corpus import find_corpus
from gpt.data.module import TokenData
from gpt.data.prepare import prepare
from gpt.data.shards import META, Prepared
from gpt.errors import InputError

TEXT = "Nothing that a person gives may be lost.\n" * 50


def documents(corpus, **options):
    return "".join(piece.text for piece in find_corpus(str(corpus), **options).pieces())


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "texts"
    (path / "part").mkdir(parents=True)
    (path / "a.txt").write_text(TEXT, encoding="utf-8")
    (path / "part" / "b.txt").write_text("second", encoding="utf-8")
    return path


def test_a_folder_of_texts_and_rows_is_refused(folder):
    (folder / "c.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    with pytest.raises(
        InputError, match=r"mixes files of rows \(.*c.jsonl\) with texts \(.*a.txt\).*/\*\*/\*\.txt"
    ):
        find_corpus(str(folder))
    assert documents(folder / "**" / "*.txt") == TEXT + "second"


def test_a_card_beside_rows_is_left_out_with_a_line(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    (tmp_path / "README.md").write_text("# card", encoding="utf-8")
    assert documents(tmp_path) == "x"
    assert "left out" in (said := capsys.readouterr().err)
    assert "README.md" in said


@pytest.mark.parametrize("pattern", ["", "**/*.txt"])
def test_an_unreadable_subfolder_is_an_error(folder, monkeypatch, pattern):
    scandir = os.scandir

    def refuse(path="."):
        if Path(path).name == "part":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"cannot read the folder .*part: Permission denied"):
        find_corpus(str(folder / pattern))


def test_a_linked_folder_is_read_and_a_broken_link_is_an_error(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.txt").write_text("third", encoding="utf-8")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert documents(folder) == TEXT + "third" + "second"
    (folder / "broken.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(InputError, match=r"broken.txt is not a file"):
        find_corpus(str(folder))
    (folder / "broken.txt").unlink()
    (folder / "loop").symlink_to(folder)
    with pytest.raises(InputError, match=r"the folder .*loop is a link to .*texts: its files"):
        find_corpus(str(folder))


@pytest.mark.parametrize("name", ["a.TXT.GZ", "a.txt.Gz", "A.JSONL.GZ"])
def test_endings_are_the_same_in_capitals(tmp_path, name):
    content = json.dumps({"text": TEXT}) if "JSON" in name else TEXT
    (tmp_path / name).write_bytes(gzip.compress(content.encode()))
    assert documents(tmp_path / name) == TEXT


def archive(kind):
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as packed:
            packed.writestr("a.txt", TEXT)
    else:
        with tarfile.open(fileobj=file, mode="w") as packed:
            packed.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", TEXT.encode("utf-16"), "is UTF-16"),
        ("a.txt", TEXT.encode("utf-16-be"), "is UTF-16"),
        ("a.csv", ("text\n" + TEXT).encode("utf-16"), "is UTF-16"),
        ("a.txt", TEXT.encode("utf-32"), "UTF-32"),
        ("a.docx", archive("zip"), "a zip archive or an office document"),
        ("a.jsonl", archive("zip"), "a zip archive"),
        ("a.tar.gz", gzip.compress(archive("tar")), "a tar archive"),
        ("a.txt", gzip.compress(TEXT.encode()), "gzip data without the ending"),
        ("a.txt", b"%PDF-1.7 \xff", "a PDF"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",  # archives contain the time
)
def test_what_is_not_utf8_text_is_recognised(tmp_path, name, content, message, errors):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{message}.*expected UTF-8 text: unpack it, or save it as UTF-8"):
        documents(tmp_path / name, errors=errors)


@pytest.mark.parametrize(
    "name", ["a.txt.gz", "a.txt.bz2", "a.txt.xz", "a.txt.zst", "a.jsonl.gz", "a.jsonl.zst"]
)
def test_a_truncated_compressed_file_is_one_line(tmp_path, name):
    import bz2
    import lzma

    import zstandard

    compress = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}
    lines = "".join(json.dumps({"text": f"{i * i} {TEXT}"}) + "\n" for i in range(50))
    packed = compress[name.rpartition(".")[2]](lines.encode())
    (tmp_path / name).write_bytes(packed)
    assert len(documents(tmp_path / name)) > 50 * len(TEXT)
    (tmp_path / name).write_bytes(packed[:-20])
    with pytest.raises(InputError, match=rf"cannot read .*{name}.*(ended before|[Tt]runcated)"):
        documents(tmp_path / name)


def test_all_frames_of_a_zstd_file_are_read(tmp_path):
    import zstandard

    (tmp_path / "a.zst").write_bytes(zstandard.compress(b"one, ") + zstandard.compress(b"two"))
    assert documents(tmp_path / "a.zst") == "one, two"


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_decompression_bomb_is_read_in_blocks(tmp_path, ending):
    import tracemalloc

    import zstandard

    size = 64 << 20
    pack = gzip.compress if ending == "gz" else zstandard.compress
    (tmp_path / f"a.{ending}").write_bytes(pack(b" " * size))
    tracemalloc.start()
    read = sum(len(piece.text) for piece in find_corpus(str(tmp_path / f"a.{ending}")).pieces())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == size
    assert peak < 40 << 20


def test_a_failed_download_says_what_to_do(tmp_path, far_files):
    for name in ("a.txt", "a.jsonl", "a.txt.gz"):
        with pytest.raises(
            InputError, match=rf"cannot read s3://.*{name} \(.*check the address and the network"
        ):
            documents(f"s3://{tmp_path}/{name}")


def test_bytes_that_are_not_utf8_can_be_replaced_in_fit_too(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 200)
    options = {"vocab_size": 300, "context_length": 16}
    with pytest.raises(InputError, match=r"--errors replace \(gpt fit: --data\.errors replace\)"):
        TokenData(str(tmp_path / "latin.txt"), **options).prepare_data()
    data = TokenData(str(tmp_path / "latin.txt"), **options, errors="replace")
    assert "caf\ufffd" in data.tokenizer.decode(data.prepared.stream("train").tokens.tolist())


@pytest.mark.skipif(os.name == "nt", reason="POSIX file names")
def test_a_file_name_that_is_not_utf8(tmp_path):
    (tmp_path / "texts").mkdir()
    path = os.path.join(os.fsencode(tmp_path), b"texts", b"caf\xe9.txt")
    with open(path, "wb") as file:
        file.write(TEXT.encode())
    for corpus in (os.fsdecode(path), str(tmp_path / "texts")):
        folder = prepare(corpus, vocab_size=300)
        assert Prepared(folder).meta.corpus == corpus


def test_a_corpus_edited_while_it_is_read_is_not_kept(tmp_path, monkeypatch, cache):
    path = tmp_path / "a.txt"
    path.write_text(TEXT * 100, encoding="utf-8")
    monkeypatch.setattr("gpt.data.prepare._BLOCK_CHARACTERS", 1000)
    add = writer.SplitWriter.add

    def edit(self, piece, ids):
        add(self, piece, ids)
        path.write_text(TEXT.upper() * 100, encoding="utf-8")

    monkeypatch.setattr(writer.SplitWriter, "add", edit)
    for output in (None, tmp_path / "out"):
        with pytest.raises(InputError, match="changed while it was read"):
            prepare(str(path), output, vocab_size=300)
        path.write_text(TEXT * 100, encoding="utf-8")
    assert not list(tmp_path.rglob("*.bin"))
    assert not list(tmp_path.rglob("meta.json"))
    monkeypatch.undo()
    monkeypatch.setenv("GPT_CACHE", str(cache))
    path.write_text("another text", encoding="utf-8")
    assert Prepared(prepare(str(path), tmp_path / "out", vocab_size=300)).count("train", "bytes") > 0


def flip(folder):
    data = bytearray((folder / "train.bin").read_bytes())
    data[10] ^= 1
    (folder / "train.bin").write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "train.bin", 10),
        lambda folder: (folder / "train.bin").unlink(),
        lambda folder: (folder / META).write_text("{", encoding="utf-8"),
        flip,
    ],
)
def test_damaged_data_in_the_cache_is_prepared_again(folder, capsys, damage):
    prepared = prepare(str(folder), vocab_size=300)
    before = (prepared / "train.bin").read_bytes()
    damage(prepared)
    assert prepare(str(folder), vocab_size=300) == prepared
    assert (prepared / "train.bin").read_bytes() == before
    assert "is damaged and is prepared again" in capsys.readouterr().err
    prepare(str(folder), vocab_size=300)
    assert capsys.readouterr().err == ""


def test_a_damaged_folder_of_ones_own_is_prepared_again(folder, tmp_path):
    prepared = prepare(str(folder), tmp_path / "out", vocab_size=300)
    flip(prepared)
    with pytest.raises(InputError, match="was altered"):
        Prepared(prepared).verify()
    Prepared(prepare(str(folder), tmp_path / "out", vocab_size=300)).verify()


def test_files_of_others_are_neither_deleted_nor_added_to(folder, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    names = {
        ".draft.tmp": "half",
        ".progress.json.old.tmp": "half",
        "diary.txt": "dear diary",
        "train.bin": "x",
    }
    for extra in ({}, {"progress.json": '{"step": 3}'}):
        names |= extra
        for name, content in names.items():
            (mine / name).write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match="holds other files"):
            prepare(str(folder), mine, vocab_size=300)
        assert {path.name: path.read_text(encoding="utf-8") for path in mine.iterdir()} == names


def test_a_compressed_line_too_long_for_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt.data.formats._LONGEST_LINE", 1000)
    path = tmp_path / "a.jsonl.gz"
    line = json.dumps({"text": "x" * 987})
    assert len(line) == 999
    path.write_bytes(gzip.compress(f"{line}\n{line}\n".encode()))
    assert documents(path) == "x" * 987 * 2
    path.write_bytes(gzip.compress(f"{line}\n  {line}\n".encode()))
    with pytest.raises(InputError, match=r"a\.jsonl\.gz has a line of more than 1,000 bytes"):
        documents(path)
