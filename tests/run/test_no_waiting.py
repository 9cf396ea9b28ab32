"""An update on a GPU waits for the device, and for other processes, only where the guard reads its flags.

The update runs on meta tensors, which have no values: whatever would read one, as `.item()` does, raises.
Most claim to be on a CUDA GPU, so that the code takes its branches for one; else they stand for Apple's.
(FakeTensorMode cannot do this on a CPU build of torch: its autograd engine knows no device "cuda".)
"""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from gpt import GPTConfig
from gpt.run.lightning_private import skip_sigterm_broadcast
from gpt.run.options import Options
from gpt.run.record import Record
from gpt.training import guard
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig
from gpt.weights.checkpoint import RunPart

CONFIG = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=2, dropout=0.1)


class Trainer(SimpleNamespace):
    """What the module and the meter ask the Trainer during an update."""

    def __init__(self, world_size):
        super().__init__(
            accumulate_grad_batches=2,
            num_training_batches=100,
            max_steps=100,
            max_epochs=-1,
            log_every_n_steps=0,
            world_size=world_size,
            global_step=0,
            precision="32-true",
            precision_plugin=SimpleNamespace(scaler=None),
            strategy=SimpleNamespace(reduce=lambda tensor, reduce_op: tensor),
        )


@pytest.fixture
def reads(monkeypatch) -> list[torch.Tensor]:
    """What the guard reads: each time whether something is not finite, and a signal."""
    seen = []
    monkeypatch.setattr(guard, "read", lambda flags: seen.append(flags) or [0, 0, 0])
    return seen


def pretend_gpu(patch: pytest.MonkeyPatch, precision: torch.dtype, cuda: bool) -> None:
    """Let all tensors say that they are on a GPU, and meta tensors do what is only for a GPU."""
    patch.setattr(torch.Tensor, "is_cuda", cuda, raising=False)
    patch.setattr(torch.Tensor, "is_meta", False, raising=False)
    patch.setattr(torch, "is_autocast_enabled", lambda device: precision != torch.float32)
    patch.setattr(torch, "get_autocast_dtype", lambda device: precision)
    patch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    patch.setattr(
        sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *args, **kwargs: None
    )


def update(
    kind: type[LanguageModel],
    precision: torch.dtype,
    optimizer: str = "muon",
    processes: int = 1,
    cuda: bool = True,
    **options,
) -> None:
    """Two updates of two batches each, as Lightning runs them."""
    with torch.device("meta"):
        module = kind(CONFIG, OptimizerConfig(name=optimizer), loss_chunk=24, **options)
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpu(patch, precision, cuda)
        run_updates(module, processes)


def run_updates(module: LanguageModel, processes: int) -> None:
    trainer, record = Trainer(processes), Record(None, RunPart(), Options(), window=16)
    module._trainer = trainer
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for index in range(4):
        tokens = torch.zeros(4, 17, dtype=torch.int64, device="meta")
        batch = tokens[:, :-1], tokens[:, 1:]
        found = module.training_step(batch, index)
        (found / 2).backward()
        if index % 2:
            module.configure_gradient_clipping(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            trainer.global_step += 1
            assert module.guard.agreed == guard.Requests()
        record.batch(module.last_term)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint_activations": True}, {"processes": 2}, {"cuda": False}, {"sampled_softmax": 8}],
)
def test_an_update_reads_once_from_the_device(precision, optimizer, options, reads):
    update(LanguageModel, precision, optimizer, **options)
    assert [tuple(flags.shape) for flags in reads] == [(3,), (3,)]


def test_lightnings_broadcast_before_each_batch_is_left_out(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *args, **options: calls.append(args))
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()  # it is the name that Lightning calls
    assert len(calls) == 1
    skip_sigterm_broadcast(trainer)
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()
    assert len(calls) == 1
