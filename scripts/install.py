"""Installs this checkout into a virtual environment: only the package, or with extras.

    python scripts/install.py .venv --extras dev

Every file is checked against the hashes of lock.txt. Two kinds are not, and a line says so: PyTorch's CPU
build, which is gigabytes smaller and comes from PyTorch's own index to machines without an NVIDIA GPU, and
files of an index or a folder to which pip is set, such as a mirror, where they are not those of the lock.

It uses uv where that is installed, else pip. It needs only the standard library, as it runs before
anything is installed.
"""

from __future__ import annotations  # so that an older Python gets as far as the line that refuses it

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")  # pip's settings of where packages are
NO_CPU_INDEX = "PyTorch's own index does not answer: PyPI's build is taken, on Linux with gigabytes of CUDA"
NO_CUDA_ON_WINDOWS = "PyPI's PyTorch for Windows has no CUDA: pytorch.org has the --index-url for your GPU"
TORCH_UNCHECKED = "PyTorch's CPU build is not in lock.txt: its hash was not checked"
UNCHECKED = (
    "this machine's package index has other files than lock.txt: they are installed by version, unchecked"
)


def has_nvidia_gpu() -> bool:
    """Whether the driver of an NVIDIA GPU is installed: its tool is then on the path."""
    return shutil.which("nvidia-smi") is not None


def cpu_index_answers(seconds: float = 5.0) -> bool:
    """Whether PyTorch's own package index can be reached."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=seconds):
            return True
    except OSError:
        return False


def pip_has_own_sources() -> bool:
    """Whether pip is set to another index than PyPI, or to folders of wheels. uv reads none of that."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    settings = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if settings.returncode:  # this Python has no pip, but that of the environment will read these variables
        variables = [f"PIP_{name.upper().replace('-', '_')}" for name in (*SOURCES, "config-file")]
        return any(variable in os.environ for variable in variables)
    return re.search(rf"\b({'|'.join(SOURCES)})=", settings.stdout) is not None


def locked(groups: set[str], lock: Path = ROOT / "lock.txt") -> str:
    """The entries of the lock that one of these groups needs; a line above each entry names its groups."""
    entries = re.split("^# for ", lock.read_text(encoding="utf-8"), flags=re.M)[1:]
    chosen = (entry for entry in entries if groups & set(entry.partition("\n")[0].split()))
    return "".join(entry.partition("\n")[2] for entry in chosen)


def make_environment(folder: Path, *, with_pip: bool) -> Path:
    """Make the virtual environment if it is missing, and return its interpreter, also if that has failed."""
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists() or (with_pip and not has_pip(python)):  # uv, or a failed venv, made it without
        options = [] if with_pip else ["--without-pip"]
        subprocess.run([sys.executable, "-m", "venv", *options, str(folder)], check=False)
    return python


def has_pip(python: Path) -> bool:
    """Whether an environment has pip."""
    command = [str(python), "-c", "import pip"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def succeeds(command: list[str]) -> bool:
    """Show a command and run it."""
    print(" ".join(command), flush=True)
    return subprocess.run(command, check=False).returncode == 0


def known_extras() -> list[str]:
    """Return the names of the extras in pyproject.toml. Python 3.10 has no parser for that file."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return re.findall(r"^([\w-]+) = \[", table, re.M)


def install(folder: Path, extras: list[str], build: str | None = None) -> bool:
    """Install the package with these extras; whether that worked.

    The `build` of PyTorch, cpu or cuda, is by default the one that suits the machine.
    """
    own_sources = pip_has_own_sources()
    # PyPI has the CUDA build for Linux only.
    cpu_build = sys.platform != "darwin" and not has_nvidia_gpu() if build is None else build == "cpu"
    cpu_index = cpu_build and cpu_index_answers()
    uv = shutil.which("uv") is not None and not own_sources
    python = make_environment(folder, with_pip=not uv)
    if uv:
        command = ["uv", "pip", "install", "--python", str(python)]
    else:
        command = [str(python), "-m", "pip", "install"]
    version: str = re.findall("^torch==.*?(?= )", locked({"torch"}), re.M)[0]
    constrained = [*command, "--constraint", str(ROOT / "constraints.txt")]
    package = ["--editable", f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)]
    groups = {"build", "package", *extras}
    # The CPU build is that of PyTorch's own index, of which nothing else is taken, or what pip is set to.
    if cpu_index:
        torch = [*command, "--no-deps", "--index-url", CPU_INDEX, version]
    elif cpu_build and own_sources:
        torch = [*constrained, version]
    else:
        if cpu_build:
            print(NO_CPU_INDEX, flush=True)
        elif sys.platform == "win32":
            print(NO_CUDA_ON_WINDOWS, flush=True)
        torch = []
        groups.add("torch")
    requirements = folder / "locked.txt"
    requirements.write_text(locked(groups), encoding="utf-8")
    checked = succeeds([*command, "--no-deps", "--require-hashes", "--requirement", str(requirements)])
    if not checked:
        if not own_sources:
            return False
        print(UNCHECKED, flush=True)
    if torch:
        print(TORCH_UNCHECKED, flush=True)
        if not succeeds(torch):
            return False
    if checked:
        return succeeds([*command, "--no-deps", "--no-build-isolation", *package])
    return succeeds([*constrained, *package])


def main() -> int:
    """Read the command line and install."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the virtual environment")
    parser.add_argument("--extras", default="", help="names of extras, separated by commas: dev, serve, ...")
    for build in ("cpu", "cuda"):
        text = f"take PyTorch's {build.upper()} build, whatever this machine has"
        parser.add_argument(f"--{build}", dest="build", action="store_const", const=build, help=text)
    options = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036 - nothing has checked it before this script runs
        print(f"Python 3.10 or newer is needed, this is {platform.python_version()}", file=sys.stderr)
        return 2
    extras = [name.strip() for name in options.extras.split(",") if name.strip()]
    if unknown := [name for name in extras if name not in known_extras()]:
        known = ", ".join(known_extras())
        print(f"there is no extra {', '.join(unknown)}, expected some of {known}", file=sys.stderr)
        return 2
    return 0 if install(options.folder, extras, options.build) else 1


if __name__ == "__main__":
    sys.exit(main())
