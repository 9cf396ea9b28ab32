"""An update on a GPU waits for the device only where the guard reads its one number.

Fake tensors of device "cuda" run through the update's own code on any machine. Reading a value of one raises,
as `.item()` does.
"""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from gpt import GPTConfig
from gpt.training import guard
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig
from gpt.training.record import Meter

CONFIG = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=2, dropout=0.1)


class Trainer(SimpleNamespace):
    """What the module and the meter ask the Trainer during an update."""

    def __init__(self):
        super().__init__(
            accumulate_grad_batches=2,
            num_training_batches=100,
            max_steps=100,
            max_epochs=-1,
            world_size=1,
            global_step=0,
            precision_plugin=SimpleNamespace(scaler=None),
            strategy=SimpleNamespace(reduce=lambda tensor, reduce_op: tensor),
        )


@pytest.fixture
def reads(monkeypatch) -> list[torch.Tensor]:
    """The numbers that the guard reads; autocast for "cuda" works without a GPU."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    read = []
    monkeypatch.setattr(guard, "is_finite", lambda total: read.append(total) is None)
    return read


def update(module: LanguageModel, precision: torch.dtype, updates: int = 2) -> None:
    """Some updates of two batches each, as Lightning runs them."""
    trainer, meter = Trainer(), Meter(every=10)
    module._trainer = trainer
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for index in range(2 * updates):
        tokens = torch.randint(0, 300, (4, 17))
        batch = tokens[:, :-1], tokens[:, 1:]
        with torch.autocast("cuda", precision, enabled=precision != torch.float32):
            loss = module.training_step(batch, index)
        (loss / 2).backward()
        if index % 2:
            module.configure_gradient_clipping(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            trainer.global_step += 1
        meter.on_train_batch_end(trainer, module, None, batch, index)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("options", [{}, {"checkpoint_activations": True}])
def test_an_update_reads_one_number_from_the_device(precision, optimizer, options, reads):
    with FakeTensorMode(), torch.device("cuda"):
        module = LanguageModel(CONFIG, OptimizerConfig(name=optimizer), loss_chunk=24, **options)
        update(module, precision)
        assert all(weight.is_cuda for weight in module.parameters())
    assert len(reads) == 2


def test_reading_a_loss_is_noticed(reads):
    class Reading(LanguageModel):
        def loss(self, batch):
            found = super().loss(batch)
            found.item()
            return found

    with FakeTensorMode(), torch.device("cuda"):
        module = Reading(CONFIG, OptimizerConfig())
        with pytest.raises(DataDependentOutputException):
            update(module, torch.bfloat16)


def test_the_guard_itself_is_noticed_too(monkeypatch, reads):
    monkeypatch.setattr(guard, "is_finite", lambda total: bool(torch.isfinite(total)))
    with FakeTensorMode(), torch.device("cuda"):
        module = LanguageModel(CONFIG, OptimizerConfig())
        with pytest.raises(DataDependentOutputException):
            update(module, torch.bfloat16)
