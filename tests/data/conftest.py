import json
import random
import sys

import pytest


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
    words = [
        "the",
        "caf\u00e9",
        "r\u00e9sum\u00e9",
        "\u4e2d\u6587",
        "don't",
        "13",
        "\U0001f600",
        "  two",
        "x=1;",
        "<|endoftext|>",
    ]
    return [
        "\n".join(" ".join(draw.choices(words, k=12)) for _ in range(draw.randint(1, 60))) for _ in range(40)
    ]


@pytest.fixture
def rows(tmp_path, texts):
    """The documents as JSON lines."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)), encoding="utf-8"
    )
    return path


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
