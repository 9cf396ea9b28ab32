"""An update on a GPU waits for the device, and for other processes, only where the guard reads its flags.

The update runs on meta tensors, which have no values: whatever would read one, as `.item()` does, raises.
They are not on a CPU, so the code takes its branches for another device.
"""

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


def make_trainer() -> SimpleNamespace:
    """What the module asks the Trainer during an update."""
    return SimpleNamespace(
        accumulate_grad_batches=2,
        log_every_n_steps=0,
        global_step=0,
        max_steps=100,
        precision="32-true",
        precision_plugin=SimpleNamespace(scaler=None),
        strategy=SimpleNamespace(reduce=lambda tensor, reduce_op: tensor),
    )


@pytest.fixture
def reads(monkeypatch) -> list[torch.Tensor]:
    """What the guard reads: each time whether something is not finite, and what is asked for."""
    seen = []
    monkeypatch.setattr(guard, "read", lambda flags: seen.append(flags) or [0, 0, 0])
    return seen


@pytest.fixture(autouse=True)
def _no_autocast(monkeypatch):
    """Torch's autocast knows no meta tensors."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)


def update_twice(module: LanguageModel) -> None:
    """Two updates of two batches each, as Lightning runs them."""
    module._trainer = make_trainer()
    record = Record(None, RunPart(), Options(), window=16)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for group in optimizer.param_groups:
        group["fused"] = False  # torch has no such kernel for meta tensors
    for number in range(4):
        tokens = torch.zeros(4, 17, dtype=torch.int64, device="meta")
        loss = module.training_step((tokens[:, :-1], tokens[:, 1:]), number)
        (loss / 2).backward()
        if number % 2:
            module.configure_gradient_clipping(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            module.trainer.global_step += 1
            assert module.guard.agreed == guard.Requests()
        record.add_batch(module.last_term)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("options", [{}, {"checkpoint_activations": True}, {"sampled_softmax": 8}], ids=str)
def test_an_update_reads_once_from_the_device(optimizer, options, reads):
    with torch.device("meta"):
        module = LanguageModel(CONFIG, OptimizerConfig(name=optimizer), loss_chunk=24, **options)
    update_twice(module)
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
