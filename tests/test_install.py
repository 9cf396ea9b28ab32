"""The installer's choices: CPU or CUDA build, uv or pip, extras or none, and what it checks."""

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import install
import lock
import pytest
from install import CPU_INDEX
from processes import ROOT

Commands = list[list[str]]


@pytest.fixture
def ran(monkeypatch, tmp_path) -> Callable[..., Commands]:
    """Runs the script on a faked machine and gives the installing commands that it would have run.

    `settings` are pip's; `refused` says whether the files are not those of the lock.
    """

    def run(
        options: str | list[str] = "",
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
            return io.BytesIO()

        words = options.split() if isinstance(options, str) else options
        (tmp_path / "venv").mkdir(exist_ok=True)
        monkeypatch.setattr("shutil.which", lambda name: name if name in programs else None)
        monkeypatch.setattr("subprocess.run", fake_run)
        monkeypatch.setattr("urllib.request.urlopen", fake_open)
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path / "venv"), *words])
        assert install.main() == status
        return commands

    return run


def test_names_of_extras_may_have_blanks_and_an_unknown_one_is_refused(ran, capsys, tmp_path):
    *_, package = ran(["--extras", "docs, serve"])
    assert package[-1] == f"{ROOT}[docs,serve]"
    assert "\nfastapi==" in (tmp_path / "venv" / "locked.txt").read_text("utf-8")
    assert ran(["--extras", "dev,server"], status=2) == []
    assert "there is no extra server, expected some of tensorboard, " in capsys.readouterr().err
    project = lock.tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert install.known_extras() == [*project["project"]["optional-dependencies"]]


GPU = ("nvidia-smi",)
SETTINGS = {
    "index": "global.index-url='https://mirror.example/simple'\n",
    "folder": ":env:.find-links='/wheels'\n",
    "further index": "global.extra-index-url='file:///x'\n",
}


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


@pytest.mark.parametrize(
    ("options", "platform", "index", "line"),
    [
        pytest.param("--cpu", "linux", False, "with gigabytes of CUDA", id="PyTorch's index does not answer"),
        pytest.param("--cuda", "win32", True, "PyPI's PyTorch for Windows has no CUDA", id="on Windows"),
    ],
)
def test_another_build_than_was_asked_for_is_said(options, platform, index, line, ran, capsys):
    ran(options, platform=platform, index=index)
    assert line in capsys.readouterr().out


@pytest.mark.slow
def test_an_environment_without_pip_is_repaired(tmp_path):
    """As uv makes it, or a venv that failed where Debian's package is missing."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    assert install.has_pip(install.make_environment(tmp_path / "venv", with_pip=True))


def test_other_files_are_refused(ran, capsys):
    """Those of PyPI have the lock's hashes."""
    (locked,) = ran(programs=GPU, refused=True, status=1)
    assert "--require-hashes" in locked and install.UNCHECKED not in capsys.readouterr().out


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_other_files_of_a_mirror_are_its_owners(settings, ran, capsys):
    _, package = ran(programs=GPU, refused=True, settings=settings)
    assert package[-4:-2] == ["--constraint", str(ROOT / "constraints.txt")]
    assert package[-1] == str(ROOT) and not {"--no-deps", "--extra-index-url"} & set(package)
    assert install.UNCHECKED in capsys.readouterr().out


def test_the_lock_is_complete_and_has_the_versions_of_the_constraints():
    """Every requirement of every group has an entry with a hash; `make lock` writes them."""
    project = lock.tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    for group, requirements in lock.groups(project).items():
        text = install.locked({group, "package", "torch"})
        for name in (re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements):
            assert re.search(rf"^{name}==", text, re.M), f"{name} of {group} is not in lock.txt: make lock"
    text = install.locked({"package", "torch", "build", *project["project"]["optional-dependencies"]})
    entries = lock.ENTRY.findall(text)
    assert len(entries) > 150 and all("--hash=sha256:" in entry for entry in entries)
    locked = [entry.split()[0] for entry in entries]
    names = {one.partition("==")[0] for one in locked}
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", constraints, re.M):
        normal = name.lower().replace("_", "-")
        if normal in names:
            assert f"{normal}=={version}" in locked, f"lock.txt has another {name}: make lock"


def test_a_lock_that_is_not_written_to_its_end_leaves_the_old_one(tmp_path, monkeypatch):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "lock.txt").write_text("old", "utf-8")
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    monkeypatch.setattr(lock, "resolved", lambda requirements: ["a==1\n"])

    def interrupted(descriptor):
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr("os.fsync", interrupted)
        lock.main()
    assert (tmp_path / "lock.txt").read_text("utf-8") == "old"
    lock.main()
    assert (tmp_path / "lock.txt").read_text("utf-8") == f"{lock.HEADING}# for package\na==1\n"


def test_actions_are_pinned_and_may_only_read():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text("utf-8")
        assert "permissions:\n  contents: read\n" in text and text.count("permissions:") == 1
        assert re.findall(r"uses: \S+", text) == re.findall(r"uses: [\w/-]+@[0-9a-f]{40}(?=  # v\d)", text)
        assert text.count("actions/checkout@") == text.count("persist-credentials: false")
        assert "--extra-index-url" not in text
