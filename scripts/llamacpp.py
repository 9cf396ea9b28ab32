"""Build llama.cpp's programs for `benchmark.py generate --llamacpp`: `python scripts/llamacpp.py DIR`.

The source comes from llama-cpp-python on the package index. It takes some minutes, and needs cmake and a C++
compiler. DIR then holds llama-bench, which measures, and llama-quantize, which rounds weights.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SOURCE = "llama-cpp-python==0.3.36"
PROGRAMS = ("llama-bench", "llama-quantize")
OFF = (
    "BUILD_SHARED_LIBS",
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_SERVER",
    "LLAMA_OPENSSL",
)


def build(folder: Path, jobs: int) -> None:
    """Download, unpack and compile in a temporary folder, then copy the programs to `folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*download, SOURCE, "--dest", work], check=True)
        with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        source = next(work.glob("*/vendor/llama.cpp"))
        options = ["-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}=OFF" for name in OFF)]
        subprocess.run(["cmake", "-S", source, "-B", work / "build", *options], check=True)
        targets = ["--target", *PROGRAMS, "--parallel", str(jobs)]
        subprocess.run(["cmake", "--build", work / "build", *targets], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        for program in PROGRAMS:
            shutil.copy2(work / "build" / "bin" / program, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    options = parser.parse_args()
    build(options.folder, options.jobs)
