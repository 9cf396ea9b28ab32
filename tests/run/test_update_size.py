"""`--data.tokens_per_update`: the same updates, however they are divided over batches and processes."""

import csv
from pathlib import Path

import pytest
import torch
import yaml
from tiny_runs import TINY

from gpt.cli import main
from gpt.run.micro_batch import _spilled, is_out_of_memory
from gpt.training.module import LanguageModel
from gpt.weights.checkpoint import read

# A window has 16 tokens: an update of 384 tokens has 24 windows.
UPDATES = [
    *TINY,
    *("--trainer.accumulate_grad_batches", "1", "--data.tokens_per_update", "384", "--log_every", "1"),
    *("--model.config.dropout", "0", "--trainer.max_steps", "6", "--trainer.val_check_interval", "3"),
]


def rows(run: str) -> list[dict[str, str]]:
    with open(f"runs/{run}/metrics.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def seen(monkeypatch) -> list[torch.Tensor]:
    """The inputs of all training batches, in order."""
    batches: list[torch.Tensor] = []

    def step(self, batch, number, original=LanguageModel.training_step):
        batches.append(batch[0].clone())
        return original(self, batch, number)

    monkeypatch.setattr(LanguageModel, "training_step", step)
    return batches


@pytest.fixture
def memory(monkeypatch):
    """Lets batches of more than `limit` windows fail as an allocation does."""

    def install(limit: int, error: BaseException) -> list[int]:
        tried = []

        def loss(self, batch, original=LanguageModel.loss):
            tried.append(len(batch[0]))
            torch.rand(1)  # as dropout draws
            if len(batch[0]) > limit:
                raise error
            return original(self, batch)

        monkeypatch.setattr(LanguageModel, "loss", loss)
        return tried

    return install


@pytest.mark.parametrize(("batch_size", "expected"), [(100, 24), (11, 8)])
def test_updates_are_the_same_whatever_the_micro_batch(batch_size, expected, seen, workplace):
    assert main([*UPDATES, "--data.batch_size", "24", "--run", "whole"]) == 0
    whole = torch.cat(seen)
    seen.clear()
    assert main([*UPDATES, "--data.batch_size", str(batch_size), "--run", "split"]) == 0
    assert {len(batch) for batch in seen} == {expected}
    assert torch.equal(torch.cat(seen), whole)
    for one, other in zip(rows("whole"), rows("split"), strict=True):
        assert one["step"] == other["step"]
        assert one["tokens"] == other["tokens"]
        for name in ("train_loss", "val_loss", "learning_rate", "gradient_norm"):
            assert (float(one[name] or 0)) == pytest.approx(float(other[name] or 0), rel=1e-4), name
    assert [row["step"] for row in rows("split") if row["val_loss"]] == ["3", "6"]


ALLOCATIONS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


def test_the_micro_batch_is_halved_until_it_fits_and_written_down(memory, workplace):
    tried = memory(7, ALLOCATIONS[0])
    assert main([*UPDATES, "--data.batch_size", "24", "--run", "halved"]) == 0
    assert tried[:4] == [24, 12, 6, 6]  # three trials, then training
    options = yaml.safe_load(Path("runs/halved/config.yaml").read_text(encoding="utf-8"))
    assert options["data"]["batch_size"] == 6
    assert options["data"]["tokens_per_update"] == 384
    saved = read("runs/halved/checkpoints/last.safetensors").run.options
    assert saved["data"]["batch_size"] == 6
    tried.clear()
    assert main(["fit", "--resume", "runs/halved", "--trainer.max_steps", "8"]) == 0
    assert set(tried) == {6}


def test_the_trial_sees_the_memory_of_a_later_batch(monkeypatch, workplace):
    """From an update's second batch on there are gradients, and the optimizer's moments beside them."""
    empty, taken = torch.empty, []

    def loss(self, batch, original=LanguageModel.loss):
        if len(batch[0]) > 6 and any(weight.grad is not None for weight in self.parameters()):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return original(self, batch)

    def noted(*size, **options):
        made = empty(*size, **options)
        taken.append((made.shape, made.dtype))
        return made

    monkeypatch.setattr(LanguageModel, "loss", loss)
    monkeypatch.setattr("gpt.run.micro_batch.torch.empty", noted)
    options = ["--data.batch_size", "12", "--run", "halved"]
    assert main([*UPDATES, *options]) == 0
    options = yaml.safe_load(Path("runs/halved/config.yaml").read_text(encoding="utf-8"))
    assert options["data"]["batch_size"] == 6
    moments = {dtype for shape, dtype in taken if len(shape) == 2 and shape[0] == 2}
    assert moments == {torch.float32}


@pytest.mark.parametrize(("reserved", "spilled"), [(79, False), (80, True), (95, True)])
def test_what_a_driver_puts_into_the_systems_memory_does_not_fit(reserved, spilled, monkeypatch):
    """As that of Windows does, instead of failing."""
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 80))
    assert _spilled(torch.device("cuda")) == spilled


def test_the_trial_changes_nothing(memory, workplace):
    options = [*UPDATES, "--model.config.dropout", "0.2", "--data.batch_size"]
    tried = memory(12, MemoryError())
    assert main([*options, "12", "--run", "fits"]) == 0
    assert main([*options, "24", "--run", "halved"]) == 0
    assert tried.count(24) == 1
    assert [row["train_loss"] for row in rows("fits")] == [row["train_loss"] for row in rows("halved")]


def test_other_errors_are_not_taken_for_a_lack_of_memory(memory, workplace):
    assert all(map(is_out_of_memory, ALLOCATIONS))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    memory(7, ValueError("something else"))
    with pytest.raises(ValueError, match="something else"):
        main([*UPDATES, "--data.batch_size", "24", "--run", "broken"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--data.tokens_per_update", "390"),
            "tokens_per_update 390 is no multiple of 16, a window on each process: give 384",
        ),
        (("--data.tokens_per_update", "0"), "tokens_per_update must be at least 1, got 0"),
        (("--data.batch_size", "0"), "batch_size must be at least 1, got 0"),
        (("--trainer.accumulate_grad_batches", "2"), "decides accumulate_grad_batches: give only one"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(options, message, workplace, capsys):
    assert main([*UPDATES, *options, "--run", "bad"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not Path("runs/bad").exists()
