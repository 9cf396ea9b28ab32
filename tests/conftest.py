"""Shared by every test: a tiny model, a small text, and a temporary cache."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import TEXT

from gpt import GPT, GPTConfig
from gpt.cli import main

# As the forked processes of the tests: with another number of threads, sums differ in their last digits.
torch.set_num_threads(1)

TINY = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=4, num_layers=2)


# Their tests fork programs that train or serve; in one worker, where they take turns.
FORKING = {f"test_{name}.py" for name in ("distributed", "signals", "folder", "scale")}
# The rooms with the longest tests, which begin first, so that no worker waits for another at the end.
LONGEST_FIRST = ("run", "data", "generation", "serve", "training", "plan", "evaluation", "pictures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first."""

    def place(item: pytest.Item) -> int:
        room = item.path.parent.name
        last = LONGEST_FIRST.index(room) if room in LONGEST_FIRST else len(LONGEST_FIRST)
        return -1 if item.path.name in FORKING else last

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests run in one worker, which makes their fixtures once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "forking" if Path(file).name in FORKING else file

    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_running():
    """What the tests start ends with them, also where they are killed."""
    if not Path("/proc/self/environ").exists():
        yield
        return
    os.environ["GPT_TESTS"] = str(os.getpid())
    command = [sys.executable, str(Path(__file__).with_name("watch.py")), str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as watch:
        yield
        watch.kill()


@pytest.fixture(scope="session", autouse=True)
def _temporary_cache(tmp_path_factory: pytest.TempPathFactory):
    """Prepared data goes into a temporary folder, which the tests of one process share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _quiet_subprocesses():
    """Subprocesses do not warn about files that other libraries open; this process still checks its own."""
    os.environ.pop("PYTHONWARNDEFAULTENCODING", None)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def config() -> GPTConfig:
    return TINY


@pytest.fixture
def model(config: GPTConfig) -> GPT:
    return GPT(config).eval()


@pytest.fixture
def tokens(config: GPTConfig) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (3, config.context_length))


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A small text that a tiny model can learn from."""
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog — naïvely.\n" * 200, "utf-8")
    return path


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, with a text of about nine steps an epoch."""
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refusal(capsys) -> Callable[..., str]:
    """Runs a command that ends with status 2, and returns its only line."""

    def run(command: str, *words: str) -> str:
        capsys.readouterr()
        assert main([*command.split(), *words]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1, err
        return err

    return run


@pytest.fixture
def clock(monkeypatch):
    """Lets time pass only in updates: an eighth of a second in each, and `first` more in the first."""
    from gpt.run.record import Record
    from gpt.training.module import LanguageModel

    seconds, rates = 0.0, []

    def install(first: float = 0.0) -> list[float]:
        def clip(self, optimizer, *args, original=LanguageModel.configure_gradient_clipping, **options):
            nonlocal seconds, first
            seconds, first = seconds + 0.125 + first, 0.0
            rates.append(optimizer.param_groups[0]["lr"])
            return original(self, optimizer, *args, **options)

        monkeypatch.setattr(LanguageModel, "configure_gradient_clipping", clip)
        monkeypatch.setattr(Record, "elapsed", lambda self: seconds)
        return rates

    return install
