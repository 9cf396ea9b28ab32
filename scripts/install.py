"""Installs this checkout into a virtual environment: the package alone, or with extras.

    python scripts/install.py .venv --extras dev

On a machine without an NVIDIA GPU it takes PyTorch's CPU build, which is gigabytes smaller. It uses uv where
that is installed, else pip. Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations  # so that an older Python gets as far as the line that refuses it

import argparse
import platform
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def has_nvidia_gpu() -> bool:
    """Whether the driver of an NVIDIA GPU is installed: its tool is then on the path."""
    return shutil.which("nvidia-smi") is not None


def cpu_index_answers(seconds: float = 5.0) -> bool:
    """Whether PyTorch's own package index can be reached: without it, the usual index has to do."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=seconds):
            return True
    except OSError:
        return False


def install_command(python: Path, extras: str, *, uv: bool, cpu_build: bool) -> list[str]:
    """The command that installs the checkout for the interpreter `python`.

    Args:
        python: the virtual environment's interpreter.
        extras: names of extras, separated by commas; empty for none.
        uv: use uv rather than pip.
        cpu_build: take PyTorch from its index of CPU builds.
    """
    installer = (
        ["uv", "pip", "install", "--python", str(python)] if uv else [str(python), "-m", "pip", "install"]
    )
    index = (["--torch-backend", "cpu"] if uv else ["--extra-index-url", CPU_INDEX]) if cpu_build else []
    package = f"{ROOT}[{extras}]" if extras else str(ROOT)
    return [*installer, *index, "--constraint", str(ROOT / "constraints.txt"), "--editable", package]


def main() -> int:
    """Create the environment if it is not there, and install into it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the virtual environment")
    parser.add_argument("--extras", default="", help="names of extras, separated by commas: dev, serve, ...")
    options = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036 - nothing has checked it before this script runs
        print(f"Python 3.10 or newer is needed, this is {platform.python_version()}", file=sys.stderr)
        return 2
    # The macOS builds have no CUDA; elsewhere the usual index serves the CUDA build.
    wants_cpu_build = sys.platform != "darwin" and not has_nvidia_gpu()
    cpu_build = wants_cpu_build and cpu_index_answers()
    # uv reads none of pip's settings, such as a local folder of wheels. Without the CPU index it would fetch
    # the CUDA build, where pip may be configured to find another.
    uv = shutil.which("uv") is not None and (cpu_build or not wants_cpu_build)
    python = options.folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        made = subprocess.run(
            [sys.executable, "-m", "venv", *(["--without-pip"] if uv else []), options.folder], check=False
        )
        if made.returncode:
            print(
                "the virtual environment could not be made; on Debian: apt install python3-venv",
                file=sys.stderr,
            )
            return 2
    command = install_command(python, options.extras, uv=uv, cpu_build=cpu_build)
    print(" ".join(command), flush=True)
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
