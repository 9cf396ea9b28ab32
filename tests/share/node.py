"""Exported files, and their scripts in node."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpt import GPT, Tokenizer
from gpt.share.file import write
from gpt.text.template import Template
from gpt.weights.load import StoredModel

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(not NODE, reason="node is not installed")


def export(
    path: Path, model: GPT, tokenizer: Tokenizer | None = None, template: Template | None = None, **options
) -> Path:
    """A file with the model, with these options of `write` instead of those of the tests."""
    stored = StoredModel("gpt", model.config, model.state_dict(), tokenizer, template)
    write(path, stored, **{"name": "tiny", "precision": "float32", **options})
    return path


def run(path: Path, *asked: Any) -> list[Any]:
    """What the file's scripts answer: see node.js."""
    assert NODE
    script = Path(__file__).with_name("node.js")
    given = json.dumps(asked)
    done = subprocess.run(
        [NODE, script, path], input=given, capture_output=True, encoding="utf-8", timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)
