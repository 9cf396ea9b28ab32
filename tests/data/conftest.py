import random
import sys

import pytest
from corpora import write_texts

WORDS = ["the", "caf\u00e9", "r\u00e9sum\u00e9", "\u4e2d\u6587", "don't", "13", "\U0001f600", "  two", "x=1;"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Prepared data, and what `datasets` keeps, go into the test's own folder."""
    monkeypatch.setenv("GPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.fixture
def texts():
    """Forty documents of 1 to 60 lines, in several alphabets."""
    draw = random.Random(5)

    def line() -> str:
        return " ".join(draw.choices([*WORDS, "<|endoftext|>"], k=12))

    return ["\n".join(line() for _ in range(draw.randint(1, 60))) for _ in range(40)]


@pytest.fixture
def rows(tmp_path, texts):
    """The documents as JSON lines."""
    return write_texts(tmp_path / "rows.jsonl", texts)


@pytest.fixture
def far_files(monkeypatch):
    """`s3://` reads local files, as tests have no network."""
    from fsspec.implementations.local import LocalFileSystem

    class Far(LocalFileSystem):
        protocol = ("s3",)

        @classmethod
        def _strip_protocol(cls, path):
            return path.removeprefix("s3://")

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "s3", Far)
