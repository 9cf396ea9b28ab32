"""The program by clang, natively and for other systems; it needs the wheel `ziglang`, and minutes."""

import shlex
import subprocess
import sys

import pytest

from gpt import generate
from gpt.generation import build, for_decoding
from gpt.generation.compiled import Compiled
from gpt.generation.decoding import backend_of
from tests.generation.conftest import sharp, slow_greedy

pytest.importorskip("ziglang", reason="ziglang is not installed")
pytestmark = pytest.mark.slow
CLANG = [sys.executable, "-m", "ziglang", "c++"]


@pytest.mark.parametrize("target", ["aarch64-macos", "x86_64-macos", "aarch64-linux-gnu"])
def test_it_compiles_for(target, tmp_path):
    command = [*CLANG, "-target", target, *build._OPTIONS, "-Werror", "-Wno-psabi", str(build.SOURCE)]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "step.so")], capture_output=True, encoding="utf-8", check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_it_runs(precision, tmp_path_factory, monkeypatch):
    """By `CXX` of several words; the comparison with the model decides that it is used."""
    cache = tmp_path_factory.getbasetemp() / "clang"  # built once
    monkeypatch.setenv("GPT_CACHE", str(cache))
    monkeypatch.setenv("CXX", shlex.join(CLANG))
    monkeypatch.setattr(build, "_COMPILER_SECONDS", 600.0)  # zig builds the standard library first
    assert build.build()
    model = for_decoding(sharp(), precision)
    assert isinstance(backend_of(model), Compiled)
    written = generate(model, [[5, 6, 7]], max_new_tokens=30, temperature=0)
    if precision == "float32":
        assert written == [slow_greedy(model, [5, 6, 7], 30)]
