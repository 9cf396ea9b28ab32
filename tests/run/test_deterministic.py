"""`--trainer.deterministic true`: what it sets; compiled runs resume exactly."""

import os
from pathlib import Path

import pytest
import torch
from tiny_runs import fit, gpt, killed, result

from gpt.training import compilation
from gpt.training.module import LanguageModel


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """The mode is the process's, and Lightning leaves it on."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    yield
    torch.use_deterministic_algorithms(False)


def test_it_is_on_while_a_run_trains_and_changes_nothing_on_a_cpu(workplace, monkeypatch):
    modes = []

    def step(self, *arguments, original=LanguageModel.training_step):
        strict = not torch.is_deterministic_algorithms_warn_only_enabled()
        modes.append((torch.are_deterministic_algorithms_enabled(), strict))
        return original(self, *arguments)

    monkeypatch.setattr(LanguageModel, "training_step", step)
    short = "--trainer.max_steps 4 --trainer.val_check_interval 2"
    assert fit(f"{short} --run plain") == 0
    assert set(modes) == {(False, True)}
    modes.clear()
    assert fit(f"{short} --run strict --trainer.deterministic true") == 0
    assert set(modes) == {(True, True)}  # with "warn", attention's backward pass would not be deterministic
    assert torch._inductor.config.deterministic  # no choice of kernels by their speed
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert result("strict") == result("plain")


EVERY_STEP = """--checkpoint_every 1 --keep_checkpoints 9 --model.compile true --trainer.max_steps 4
--trainer.val_check_interval 2"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["false", "true"])
def test_a_compiled_run_with_dropout_resumes_exactly(mode, workplace):
    if not compilation.has_compiler():
        pytest.skip("no C++ compiler")
    assert fit(f"{EVERY_STEP} --run whole --trainer.deterministic {mode}") == 0
    run = killed(Path("runs/whole"), 2)
    assert gpt(f"fit --resume {run}") == 0
    assert result(run) == result("whole")
