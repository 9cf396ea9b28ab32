"""What the name of a corpus stands for: files, corpus files, data sets of the hub, URLs."""

import gzip
import hashlib
import json
import re
from itertools import zip_longest
from unittest.mock import Mock

import aiohttp
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from corpora import documents, write
from datasets import load_dataset

from gpt.data.find import find_corpus, shipped_corpora
from gpt.data.prepare import prepare
from gpt.errors import InputError


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


LEADS_NOWHERE = {
    "no file": ("novel.txt", r"no corpus 'novel.txt'.*python-docs, python-stdlib"),
    "a slip": ("mine/nvel.txt", r"no corpus 'mine/nvel.txt': did you mean mine/novel.txt\?"),
    "another name": ("mine/nomad.txt", "no corpus 'mine/nomad.txt': expected a text file"),
    "no folder": ("yours/deep/novel.txt", "expected a text file"),
    "no folder, which could be an owner on the hub": ("yours/novel.txt", "no corpus 'yours/novel.txt'"),
    "no name": ("", "no corpus ''"),
    "a pattern": ("*.csv", "no file matches"),
    "a slip in a corpus file": ("mine/slip.yaml", "there is no builtin:docs, expected one of builtin:py"),
    "another protocol": ("reference://x", "expected a path, or a URL of https, http, s3, gs, hf$"),
}


@pytest.mark.parametrize(("name", "message"), LEADS_NOWHERE.values(), ids=LEADS_NOWHERE)
def test_names_that_lead_nowhere(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine" / "novel.txt", "text")
    write(tmp_path / "mine" / "slip.yaml", "corpus: {files: [novel.txt, 'builtin:docs']}")
    with pytest.raises(InputError, match=message):
        find_corpus(name)


def test_a_folder_has_text_and_one_kind_of_it(tmp_path):
    write(tmp_path / "void" / "a.txt", "")
    with pytest.raises(InputError, match="is empty"):
        prepare(str(tmp_path / "void"))
    write(tmp_path / "void" / "b.jsonl", '{"text": "row"}')
    mixed = r"mixes files of rows \(.*b.jsonl\) with texts \(.*a.txt\).* such as '.*/void/\*\*/\*\.txt'"
    with pytest.raises(InputError, match=mixed):
        find_corpus(str(tmp_path / "void"))
    write(tmp_path / "void" / "more" / "c.jsonl.gz", gzip.compress(b'{"text": "row"}'))
    write(tmp_path / "void" / "more" / "d.jsonl.gz", gzip.compress(b'{"text": "row"}'))
    (tmp_path / "void" / "b.jsonl").unlink()
    for name in ("void", "vo*/**"):
        with pytest.raises(InputError, match=r"such as '.*/void/\*\*/\*\.jsonl\.gz'"):
            find_corpus(str(tmp_path / name))


@pytest.fixture
def hub(tmp_path, texts, monkeypatch):
    """A data set laid out as the hub lays them out: two configurations, Parquet shards, a card.

    Returns a function that writes a corpus file of it with these lines.
    """
    folder = tmp_path / "owner" / "name"
    card = "---\nconfigs:\n"
    for name in ("plain", "other"):
        card += f"- config_name: {name}\n  data_files: [{{split: train, path: {name}/train-*}}]\n"
    write(folder / "README.md", card + "---\n# A card\n")
    shards = {"plain/train-00000-of-00002": texts[:20], "plain/train-00001-of-00002": texts[20:]}
    for name, part in {**shards, "other/train-00000-of-00001": ["other"]}.items():
        path = folder / f"{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": part, "url": ["u"] * len(part)}), path)
    monkeypatch.chdir(tmp_path)  # where `datasets` finds it without the network
    return lambda more: write(tmp_path / "hub.yaml", f"corpus: {{files: 'hub:owner/name', {more}}}")


def test_hub_data_sets(hub, texts):
    recipe = hub("subset: plain")
    assert documents(recipe) == documents("owner/name/plain") == texts
    with pytest.raises(InputError, match="no corpus 'owner/nothing'"):
        find_corpus("owner/nothing")
    lacks = r"no column 'body', it has text, url: choose one with --text_column"
    with pytest.raises(InputError, match=lacks):
        documents(recipe, text_column="body")
    with pytest.raises(InputError, match=r"cannot read .*owner/name.*missing"):
        documents(hub("subset: missing"))


@pytest.mark.parametrize("error", [aiohttp.ClientError, httpx.HTTPError, KeyError, TimeoutError])
def test_every_error_of_the_network_names_the_data_set(hub, monkeypatch, error):
    """`datasets` and what it uses raise errors that have no common class."""
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=error("no answer")))
    corpus = find_corpus(str(hub("subset: plain")))
    for use in (lambda: list(corpus.pieces()), lambda: corpus.estimated_size(0, 0)):
        with pytest.raises(InputError, match=rf"cannot read hub:owner/name \({error.__name__}: .*no answer"):
            use()


def test_a_corpus_file_asks_the_hub_for_its_revision(hub, monkeypatch):
    asked = []

    def load(*names, revision, **options):
        asked.append(revision)
        return load_dataset(*names, **options)

    monkeypatch.setattr("datasets.load_dataset", load)
    assert documents(hub("subset: other, revision: 'v2'")) == ["other"]
    documents(hub("subset: other"))
    assert asked == ["v2", None]


@pytest.mark.parametrize("name", shipped_corpora())
def test_corpus_files_describe_themselves_and_what_they_name_stays_what_it_is(name, monkeypatch):
    monkeypatch.setattr("gpt.data.find._download", lambda url, sha256: url)
    recipe = yaml.safe_load(shipped_corpora()[name].read_text("utf-8"))
    assert {"about", "source", "licence", "size", "corpus"} <= set(recipe)
    corpus = find_corpus(name)
    assert corpus.files
    for file, expected in zip_longest(corpus.files, corpus.sha256):
        assert file.startswith("builtin:") or re.fullmatch("[0-9a-f]{40,64}", expected or corpus.revision)


NO_CORPUS_FILES = {
    "an alias": ("a: &a [x]\ncorpus: {files: *a}", "an alias"),
    "too large": ("#" * 70_000, "more than 65,536 bytes"),
    "a list": ("- a", "needs a mapping"),
    "too deep": ("a: " + "[" * 10_000, "recursion"),
    "not yaml": ("corpus: {files: [", "while parsing"),
}
NO_CORPORA = {
    "{file: x}": "has no key 'file': did you mean files",
    "{files: a.txt, template: {user: x}}": "has no key 'template': expected files, subset",
    "{text_column: x}": "it names no files",
    "{files: [1, a.txt]}": "expected tuple",
    "{files: a.txt, sha256: abc}": "sha256 is 'abc', expected 64 hexadecimal digits",
    "{files: a.txt, sha256: [a, b]}": "2 values for 1 file",
    "{files: [a.txt, b.txt], weights: 0.5}": "weights has 1 value for 2 files",
    "{files: a.txt, weights: 2}": "weights has 2, expected .* at most 1",
    "{files: a.txt, weights: 0}": "weights has 0, expected .* above 0",
    "{files: a.txt, weights: .nan}": "weights is .*nan.*expected .*finite",
    "{files: [a.txt, a.txt], weights: [1, 0.5]}": "a file is named twice",
    "{files: a.txt, skip_bad_rows: -1}": "skip_bad_rows must be at least 0",
}
NO_CORPUS_FILES |= {text: (f"corpus: {text}", message) for text, message in NO_CORPORA.items()}


@pytest.mark.parametrize(("text", "message"), NO_CORPUS_FILES.values(), ids=NO_CORPUS_FILES)
def test_corpus_files_that_are_none(tmp_path, text, message):
    with pytest.raises(InputError, match=f"not a corpus file.*{message}"):
        find_corpus(str(write(tmp_path / "mine.yaml", text)))


def test_a_url_is_downloaded_once(tmp_path, far_files):
    long = "\u4e2d" * 70
    path = write(tmp_path / f"{long}.txt.gz?download=1", gzip.compress(b"from afar\r\n"))
    with pytest.raises(InputError, match=r"cannot read s3://.*nothing\.txt"):
        find_corpus(f"s3://{tmp_path}/nothing.txt")
    assert documents(f"s3://{path}") == ["from afar\r\n"]
    path.unlink()
    recipe = write(tmp_path / "far.yaml", f"corpus: {{files: ['s3://{path}']}}")
    assert documents(recipe) == ["from afar\r\n"]
    assert not list((tmp_path / "cache").rglob("nothing*"))


def test_a_download_that_is_no_text_is_refused_each_time(tmp_path, far_files):
    """The second time it comes from the cache."""
    path = write(tmp_path / "a.txt", "many words".encode("utf-16-le"))
    for _ in range(2):
        with pytest.raises(InputError, match=r"a\.txt seems to be UTF-16LE without a byte order mark"):
            find_corpus(f"s3://{path}")


def test_a_corpus_file_names_files_here_or_beside_it(tmp_path, monkeypatch):
    for folder in ("mine", "here"):
        write(tmp_path / folder / "a.txt", folder)
    recipe = write(tmp_path / "mine" / "both.yaml", "corpus: {files: a.txt}")
    assert documents(recipe) == ["mine"]
    monkeypatch.chdir(tmp_path / "here")
    assert documents(recipe) == ["here"]


def test_a_download_with_another_hash_is_refused(tmp_path, far_files):
    """It is named with both hashes, as it comes and in the cache; nothing of it is kept."""
    expects = f"SHA-256 {sha256('evil')}, the corpus file expects {sha256('hello')}"
    far = write(tmp_path / "a.txt", "evil")
    recipe = write(tmp_path / "far.yaml", f"corpus: {{files: 's3://{far}', sha256: {sha256('hello')}}}")
    with pytest.raises(InputError, match=f"^s3://{far} has the {expects}"):
        find_corpus(str(recipe))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    write(far, "hello")
    assert documents(recipe) == ["hello"]
    (kept,) = (tmp_path / "cache").rglob("a.txt")
    write(kept, "evil")
    with pytest.raises(InputError, match=f"^delete {kept} .*{expects}"):
        find_corpus(str(recipe))


def test_each_file_of_a_corpus_file_has_its_own_hash(tmp_path):
    files = [str(write(tmp_path / name, name)) for name in ("a.txt", "b.txt")]
    corpus = {"files": files, "sha256": [sha256("a.txt"), sha256("b.txt")]}
    recipe = write(tmp_path / "both.yaml", json.dumps({"corpus": corpus}))
    assert documents(recipe) == ["a.txt", "b.txt"]
    write(tmp_path / "b.txt", "other")
    with pytest.raises(InputError, match=rf"^{files[1]} has the SHA-256 .*expects {sha256('b.txt')}"):
        find_corpus(str(recipe))
