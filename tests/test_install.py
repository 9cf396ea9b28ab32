"""The installer's choices: CPU or CUDA build, uv or pip, extras or none."""

import re
import runpy
import sys
import venv
from pathlib import Path

import check_install
import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "install.py"


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Runs the script on a faked machine and gives the install command that it would have run."""

    def run(*, gpu: bool, uv: bool, index: bool, platform: str = "linux", extras: str = "") -> list[str]:
        commands = []

        def fake_run(command, **options):
            commands.append([str(word) for word in command])
            return type("Done", (), {"returncode": 0})()

        def fake_open(*arguments, **options):
            if not index:
                raise OSError("no network")
            return (tmp_path / "page").open("wb")

        names = {"nvidia-smi": gpu, "uv": uv}
        monkeypatch.setattr("shutil.which", lambda name: name if names[name] else None)
        monkeypatch.setattr("subprocess.run", fake_run)
        monkeypatch.setattr("urllib.request.urlopen", fake_open)
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path / "venv"), "--extras", extras])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert ended.value.code == 0
        return commands[-1]

    return run


def test_the_build_suits_the_machine(ran):
    """A CPU build without a GPU; pip and its settings decide where PyTorch's own index does not answer."""
    assert "https://download.pytorch.org/whl/cpu" in ran(gpu=False, uv=False, index=True)
    command = ran(gpu=False, uv=True, index=True, extras="dev")
    assert command[0] == "uv" and command[command.index("--torch-backend") + 1] == "cpu"
    assert command[-1] == f"{SCRIPT.parents[1]}[dev]"
    assert command[command.index("--constraint") + 1].endswith("constraints.txt")
    for command in (ran(gpu=True, uv=True, index=True), ran(gpu=False, uv=True, index=False)):
        assert "--torch-backend" not in command and "--extra-index-url" not in command


def test_every_way_to_install_is_run():
    """By `make test-install`; what makes no environment of its own could use no earlier one."""
    blocks = check_install.blocks()
    words = ("make train", "--extras serve", "scripts/install.py .venv\n", "-m pip install", "uv pip install")
    for word, block in zip(words, blocks, strict=True):
        assert word in block and (".venv" in block or "make" in block)
    assert "git clone --quiet '/" in check_install.prepared(blocks[0], True)


def test_powershell_finds_what_a_windows_environment_has(ran):
    """PowerShell itself is untested: its files by name, where Python and install.py put them on Windows."""
    text = (SCRIPT.parents[1] / "docs" / "install.md").read_text(encoding="utf-8")
    install, activate, use = re.findall(r"^```powershell\n(.*?)^```", text, re.M | re.S)[0].splitlines()
    assert install == r"py scripts\install.py .venv" and use == "gpt fit"
    assert Path(venv.__file__).with_name("scripts").joinpath("common", "Activate.ps1").is_file()
    python = ran(gpu=False, uv=False, index=False, platform="win32")[0]
    assert activate == r".venv\Scripts\Activate.ps1" and python.endswith("venv/Scripts/python.exe")
