"""The installer's choices: CPU or CUDA build, uv or pip, extras or none, and what it checks."""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import install
import lock
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "install.py"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


Commands = list[list[str]]


@pytest.fixture
def ran(monkeypatch, tmp_path) -> Callable[..., Commands]:
    """Runs the script on a faked machine and gives the installing commands that it would have run.

    `settings` are pip's; `refused` says whether the files are not those of the lock.
    """

    def run(
        options: str = "",
        *,
        programs: tuple[str, ...] = (),
        index: bool = True,
        platform: str = "linux",
        settings: str = "",
        refused: bool = False,
        status: int = 0,
    ) -> Commands:
        commands = []

        def fake_run(command, **how):
            command = [str(word) for word in command]
            if "install" in command:
                commands.append(command)
            failed = refused and "--require-hashes" in command
            return subprocess.CompletedProcess(command, int(failed), settings if "config" in command else "")

        def fake_open(*arguments, **how):
            if not index:
                raise OSError("no network")
            return (tmp_path / "page").open("wb")

        (tmp_path / "venv").mkdir(exist_ok=True)
        monkeypatch.setattr("shutil.which", lambda name: name if name in programs else None)
        monkeypatch.setattr("subprocess.run", fake_run)
        monkeypatch.setattr("urllib.request.urlopen", fake_open)
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path / "venv"), *options.split()])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert ended.value.code == status
        return commands

    return run


GPU = ("nvidia-smi",)
MIRROR = "global.index-url='https://mirror.example/simple'\n"


def test_the_cpu_build_comes_from_pytorchs_own_index_which_is_asked_for_nothing_else(ran, capsys, tmp_path):
    locked, torch, package = ran("--extras dev")
    assert torch[-4:-1] == ["--no-deps", "--index-url", CPU_INDEX] and torch[-1].startswith("torch==")
    assert CPU_INDEX not in locked + package and package[-1] == f"{ROOT}[dev]"
    assert install.TORCH_UNCHECKED in capsys.readouterr().out
    assert "\ntorch==" not in (tmp_path / "venv" / "locked.txt").read_text("utf-8")


@pytest.mark.parametrize(
    "machine",
    [{"programs": GPU}, {"index": False}, {"platform": "darwin"}, {"options": "--cuda"}],
    ids=["a GPU", "no index", "a Mac", "for another machine"],
)
def test_any_other_build_is_in_the_lock(machine, ran, capsys, tmp_path):
    locked, package = ran(**machine)
    assert "--require-hashes" in locked and CPU_INDEX not in locked + package
    assert "\ntorch==" in (tmp_path / "venv" / "locked.txt").read_text("utf-8")
    assert install.TORCH_UNCHECKED not in capsys.readouterr().out


def test_uv_installs_where_it_is_there_and_a_cpu_build_where_it_is_asked_for(ran):
    torch = ran("--cpu", programs=("uv", *GPU))[1]
    assert torch[0] == "uv" and CPU_INDEX in torch


def test_other_files_are_refused(ran, capsys):
    """Those of PyPI have the lock's hashes."""
    (locked,) = ran(programs=GPU, refused=True, status=1)
    assert "--require-hashes" in locked and install.UNCHECKED not in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [MIRROR, ":env:.find-links='/wheels'\n", "global.extra-index-url='file:///x'\n"],
    ids=["index", "folder", "further index"],
)
def test_other_files_of_a_mirror_are_its_owners(settings, ran, capsys):
    _, package = ran(programs=GPU, refused=True, settings=settings)
    assert package[-4:-2] == ["--constraint", str(ROOT / "constraints.txt")]
    assert package[-1] == str(ROOT) and not {"--no-deps", "--extra-index-url"} & set(package)
    assert install.UNCHECKED in capsys.readouterr().out


BACKEND = """
import zipfile

def wheel(folder, name):
    file = f"{name}-1-py3-none-any.whl"
    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(f"{folder}/{file}", "w") as archive:
        archive.writestr(f"{name}.pth", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 1\\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        archive.writestr(f"{info}/RECORD", "")
    return file

def build_editable(folder, config_settings=None, metadata_directory=None):
    return wheel(folder, "tool")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for a GPU's tool is a shell script")
def test_a_file_is_compared_with_its_hash(tmp_path):
    """By pip itself, in a project with one requirement, whose wheel is the lock's or was changed."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "backend.py").write_text(BACKEND, "utf-8")
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tool"\nversion = "1"\n',
        encoding="utf-8",
    )
    (tmp_path / "constraints.txt").write_text("torch==1\n", "utf-8")
    backend: dict = {}
    exec(BACKEND, backend)
    wheel = tmp_path / backend["wheel"](tmp_path, "torch")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n", "utf-8")  # so that torch is in the lock
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    environment |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": ""}

    def output(sha256: str) -> str:
        lock = f"# for torch\ntorch==1 \\\n    --hash=sha256:{sha256}\n"
        (tmp_path / "lock.txt").write_text(lock, "utf-8")
        command = [sys.executable, str(tmp_path / "scripts" / "install.py"), str(tmp_path / sha256[:8])]
        done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert install.UNCHECKED not in output(hashlib.sha256(wheel.read_bytes()).hexdigest())
    other = output("0" * 64)
    assert install.UNCHECKED in other and "DO NOT MATCH THE HASHES" in other


def test_the_lock_is_complete_and_has_the_versions_of_the_constraints():
    """Every requirement of every group has an entry with a hash; `make lock` writes them."""
    project = lock.tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    for group, requirements in lock.groups(project).items():
        text = install.locked({group, "package", "torch"})
        for one in requirements:
            name = re.match(r"[\w-]+", one)[0].lower()
            assert re.search(rf"^{name}==", text, re.M), f"{name} of {group} is not in lock.txt: make lock"
    text = install.locked({"package", "torch", "build", *project["project"]["optional-dependencies"]})
    entries = lock.ENTRY.findall(text)
    assert len(entries) > 150 and all("--hash=sha256:" in entry for entry in entries)
    pinned = {entry.split()[0] for entry in entries}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        name, _, version = line.split()[0].partition("==")
        normal = f"{name.lower().replace('_', '-')}=="
        if not line.startswith("#") and any(one.startswith(normal) for one in pinned):
            assert f"{normal}{version}" in pinned, f"lock.txt has another {name}: make lock"


def test_actions_are_pinned_and_may_only_read():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text("utf-8")
        assert "permissions:\n  contents: read\n" in text and text.count("permissions:") == 1
        assert re.findall(r"uses: \S+", text) == re.findall(r"uses: [\w/-]+@[0-9a-f]{40}(?=  # v\d)", text)
        assert text.count("actions/checkout@") == text.count("persist-credentials: false")
        assert "--extra-index-url" not in text
