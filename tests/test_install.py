"""The installer's choices: CPU or CUDA build, uv or pip, extras or none, and what it checks."""

import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import check_install
import install
import lock
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "install.py"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Runs the script on a faked machine and gives the installing commands that it would have run.

    `settings` are pip's; `refused` says whether the files are not those of the lock, and so the exit status.
    """

    def run(
        *,
        gpu: bool = False,
        uv: bool = False,
        index: bool = True,
        platform: str = "linux",
        extras: str = "",
        settings: str = "",
        refused: bool = False,
        status: int = 0,
        more: tuple[str, ...] = (),
    ) -> list[list[str]]:
        commands = []

        def fake_run(command, **options):
            command = [str(word) for word in command]
            if "install" in command:
                commands.append(command)
            failed = refused and "--require-hashes" in command
            return subprocess.CompletedProcess(command, int(failed), settings if "config" in command else "")

        def fake_open(*arguments, **options):
            if not index:
                raise OSError("no network")
            return (tmp_path / "page").open("wb")

        names = {"nvidia-smi": gpu, "uv": uv}
        (tmp_path / "venv").mkdir(exist_ok=True)
        monkeypatch.setattr("shutil.which", lambda name: name if names[name] else None)
        monkeypatch.setattr("subprocess.run", fake_run)
        monkeypatch.setattr("urllib.request.urlopen", fake_open)
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path / "venv"), "--extras", extras, *more])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert ended.value.code == status
        return commands

    return run


MIRROR = "global.index-url='https://mirror.example/simple'\n"


def test_the_build_suits_the_machine(ran, capsys, tmp_path):
    """A CPU build without a GPU, from PyTorch's own index, which is asked for nothing else."""
    locked, torch, package = ran(extras="dev")
    assert torch[-4:-1] == ["--no-deps", "--index-url", CPU_INDEX] and torch[-1].startswith("torch==")
    assert CPU_INDEX not in locked + package and package[-1] == f"{ROOT}[dev]"
    assert install.TORCH_UNCHECKED in capsys.readouterr().out
    assert "\ntorch==" not in (tmp_path / "venv" / "locked.txt").read_text(encoding="utf-8")
    assert ran(uv=True)[1][0] == "uv" and CPU_INDEX in ran(uv=True)[1]
    capsys.readouterr()
    for machine in ({"gpu": True}, {"index": False}, {"platform": "darwin"}):
        locked, package = ran(**machine)
        assert "--require-hashes" in locked and CPU_INDEX not in locked + package
        assert "\ntorch==" in (tmp_path / "venv" / "locked.txt").read_text(encoding="utf-8")
    assert install.TORCH_UNCHECKED not in capsys.readouterr().out


def test_a_build_may_be_chosen_for_another_machine(ran):
    """As for an image."""
    assert len(ran(more=("--cuda",))) == 2 and CPU_INDEX in ran(gpu=True, more=("--cpu",))[1]


def test_what_pip_is_set_to_decides_where_torchs_index_does_not_answer(ran, capsys):
    _, torch, _ = ran(index=False, settings=MIRROR, uv=True)
    assert torch[1:4] == ["-m", "pip", "install"] and "--index-url" not in torch
    assert install.TORCH_UNCHECKED in capsys.readouterr().out


def test_other_files_are_refused_or_of_a_mirror(ran, capsys):
    """Those of PyPI have the lock's hashes; what a mirror has is its owner's."""
    (locked,) = ran(gpu=True, refused=True, status=1)
    assert "--require-hashes" in locked and install.UNCHECKED not in capsys.readouterr().out
    for settings in (MIRROR, ":env:.find-links='/wheels'\n", "global.extra-index-url='file:///x'\n"):
        _, package = ran(gpu=True, refused=True, settings=settings)
        assert package[-4:-2] == ["--constraint", str(ROOT / "constraints.txt")]
        assert package[-1] == str(ROOT) and "--no-deps" not in package
        assert install.UNCHECKED in capsys.readouterr().out
    assert not any("--extra-index-url" in command for command in ran(refused=True, settings=MIRROR))


BACKEND = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "tool-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("tool.pth", "")
        wheel.writestr("tool-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tool\\nVersion: 1\\n")
        wheel.writestr("tool-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("tool-1.dist-info/RECORD", "")
    return name
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for a GPU's tool is a shell script")
def test_a_file_is_compared_with_its_hash(tmp_path):
    """By pip itself, in a project with one requirement, whose wheel is the lock's or was changed."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    (tmp_path / "backend.py").write_text(BACKEND, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tool"\nversion = "1"\n',
        encoding="utf-8",
    )
    (tmp_path / "constraints.txt").write_text("torch==1\n", encoding="utf-8")
    wheel = tmp_path / "torch-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("torch.py", "")
        file.writestr("torch-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 1\n")
        file.writestr("torch-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr("torch-1.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    outputs = []
    for known in (digest, "0" * 64):
        (tmp_path / "lock.txt").write_text(
            f"# for torch\ntorch==1 \\\n    --hash=sha256:{known}\n", encoding="utf-8"
        )
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n", encoding="utf-8")  # so that torch is in the lock
        (tmp_path / "nvidia-smi").chmod(0o755)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment |= {
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(tmp_path),
        }
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": ""}
        command = [sys.executable, str(tmp_path / "scripts" / "install.py"), str(tmp_path / known[:8])]
        done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout + done.stderr)
    assert install.UNCHECKED not in outputs[0]
    assert install.UNCHECKED in outputs[1] and "DO NOT MATCH THE HASHES" in outputs[1]


def test_the_lock_is_complete_and_has_the_versions_of_the_constraints():
    """Every requirement of every group has an entry with a hash; `make lock` writes them."""
    project = lock.tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for group, requirements in lock.groups(project).items():
        text = install.locked({group, "package", "torch"})
        for one in requirements:
            name = re.match(r"[\w-]+", one)[0].lower()
            assert re.search(rf"^{name}==", text, re.M), f"{name} of {group} is not in lock.txt: make lock"
    text = install.locked({"package", "torch", "build", *project["project"]["optional-dependencies"]})
    entries = lock.ENTRY.findall(text)
    assert len(entries) > 150 and all("--hash=sha256:" in entry for entry in entries)
    pinned = {entry.split()[0] for entry in entries}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        name, _, version = line.split()[0].partition("==")
        normal = f"{name.lower().replace('_', '-')}=="
        if not line.startswith("#") and any(one.startswith(normal) for one in pinned):
            assert f"{normal}{version}" in pinned, f"lock.txt has another {name}: make lock"


def test_actions_are_pinned_and_may_only_read():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        assert "permissions:\n  contents: read\n" in text and text.count("permissions:") == 1
        assert re.findall(r"uses: \S+", text) == re.findall(r"uses: [\w/-]+@[0-9a-f]{40}(?=  # v\d)", text)
        assert text.count("actions/checkout@") == text.count("persist-credentials: false")
        assert "--extra-index-url" not in text


def test_every_way_to_install_is_run():
    """By `make test-install`; what makes no environment of its own could use no earlier one."""
    blocks = check_install.blocks()
    words = ("make train", "scripts/install.py .venv\n", "-m pip install", "uv pip install", "--extras serve")
    for word, block in zip(words, blocks, strict=True):
        assert word in block and (".venv" in block or "make" in block)
    assert "git clone --quiet '/" in check_install.prepared(blocks[0], True)


def test_powershell_finds_what_a_windows_environment_has(ran):
    """PowerShell itself is untested: its files by name, where Python and install.py put them on Windows."""
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    install, activate, use = re.findall(r"^```powershell\n(.*?)^```", text, re.M | re.S)[0].splitlines()
    assert install == r"py scripts\install.py .venv" and use == "gpt fit"
    assert Path(venv.__file__).with_name("scripts").joinpath("common", "Activate.ps1").is_file()
    python = ran(platform="win32")[0][0]
    assert activate == r".venv\Scripts\Activate.ps1" and python.endswith("venv/Scripts/python.exe")
