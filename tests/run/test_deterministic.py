"""`--trainer.deterministic true`: what it sets and may not call; compiled runs resume exactly."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from test_no_waiting import update
from tiny_runs import fit, result
from torch.utils._python_dispatch import TorchDispatchMode

from gpt.cli import main
from gpt.training import compilation
from gpt.training.module import LanguageModel

# What raises on a GPU by the documentation of torch.use_deterministic_algorithms, as far as a model could
# call it, and what it does not list but has no deterministic form.
RAISES_ON_A_GPU = {"cumsum", "nll_loss_forward", "nll_loss2d_forward", "put_", "histc", "bincount", "median"}
RAISES_ON_A_GPU |= {"_embedding_bag", "_cudnn_attention_backward", "kthvalue", "scatter_reduce"}


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
    short = ["--trainer.max_steps", "4", "--trainer.val_check_interval", "4"]
    assert fit(*short, "--run", "plain") == 0
    assert set(modes) == {(False, True)}
    modes.clear()
    assert fit(*short, "--run", "strict", "--trainer.deterministic", "true") == 0
    assert set(modes) == {(True, True)}  # with "warn", attention's backward pass would not be deterministic
    assert torch._inductor.config.deterministic  # no choice of kernels by their speed
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert result(Path("runs/strict")) == result(Path("runs/plain"))


class Calls(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator.name().removeprefix("aten::").partition(".")[0])
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_an_update_on_a_gpu_calls_nothing_that_would_raise(optimizer, monkeypatch):
    from gpt.training import guard

    monkeypatch.setattr(guard, "read", lambda flags: [0, 0, 0])
    with Calls() as calls:
        update(LanguageModel, torch.bfloat16, optimizer)
    assert {"embedding_dense_backward", "scatter_add_", "gather"} <= calls.names  # it has seen the update
    assert not calls.names & RAISES_ON_A_GPU


def cut(run: str, step: int) -> Path:
    """A copy of a run as a kill after `step` would have left it."""
    copy = Path("runs/cut")
    shutil.copytree(Path("runs") / run, copy, ignore=shutil.ignore_patterns("checkpoints"))
    (copy / "checkpoints").mkdir()
    shutil.copy(f"runs/{run}/checkpoints/step-{step}.safetensors", copy / "checkpoints" / "last.safetensors")
    return copy


EVERY_STEP = ["--checkpoint_every", "1", "--keep_checkpoints", "9", "--model.compile", "true"]
EVERY_STEP += ["--trainer.max_steps", "4", "--trainer.val_check_interval", "4"]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own tracing
def test_a_compiled_run_with_dropout_resumes_exactly(workplace):
    if compilation.missing_compiler(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    for mode in ("false", "true"):
        shutil.rmtree("runs", ignore_errors=True)
        assert fit(*EVERY_STEP, "--run", "whole", "--trainer.deterministic", mode) == 0
        run = cut("whole", 2)
        assert main(["fit", "--resume", str(run)]) == 0
        assert result(run) == result(Path("runs/whole"))
