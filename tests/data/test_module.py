"""The data module as a Trainer uses it: each window once an epoch, also when it is resumed."""

import lightning.pytorch as pl
import pytest
import torch
from corpora import joined, write
from tiny_runs import trainer

from gpt.data.module import TokenData
from gpt.errors import InputError


class Tiny(pl.LightningModule):
    """Remembers what it was shown."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch):
        self.seen.append(batch[0].clone())
        return self.bias * batch[0].sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


def seen(folder, novel, steps, checkpoint=None, **options) -> list[torch.Tensor]:
    """The inputs of a training up to a step, which saves last.safetensors in the folder."""
    model = Tiny()
    fitting = trainer(max_steps=steps, max_epochs=-1, limit_val_batches=0, default_root_dir=folder, **options)
    fitting.fit(model, data_of(novel, shift=True), ckpt_path=checkpoint, weights_only=True)
    fitting.save_checkpoint(folder / "last.safetensors")
    return model.seen


@pytest.fixture
def novel(tmp_path) -> str:
    words = [f"chapter {number} of caf\u00e9 {number * number * 7919}" for number in range(130)]
    return str(write(tmp_path / "novel.txt", " ".join(words)))


def data_of(novel, **options) -> TokenData:
    return TokenData(novel, **{"vocab_size": 300, "context_length": 16, "batch_size": 4, **options})


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 7}, {"accumulate_grad_batches": 3}], ids=str)
def test_a_resumed_run_sees_the_same_batches(novel, tmp_path, options):
    batches = len(data_of(novel).train_dataloader())
    assert 20 < batches < 60
    steps = 2 * batches // options.get("accumulate_grad_batches", 1)
    whole = seen(tmp_path, novel, steps, **options)
    for stop in (5, steps // 2, steps - 3):  # inside an epoch, at or near an end, inside the last
        first = seen(tmp_path, novel, stop, **options)
        second = seen(tmp_path, novel, steps, tmp_path / "last.safetensors", **options)
        assert torch.equal(torch.stack(first + second), torch.stack(whole))


def test_a_text_shorter_than_a_window_is_refused_with_both_lengths(tmp_path):
    path = str(write(tmp_path / "small.txt", "To be, or not to be, that is the question. " * 12))
    with pytest.raises(InputError, match=r"3\d\d tokens, fewer than the context_length of 512"):
        data_of(path, context_length=512).train_dataloader()


UPDATE = 24 * 16  # tokens, 24 windows


@pytest.mark.parametrize(
    ("processes", "most", "batch_size", "accumulate"),
    [(1, 24, 24, 1), (1, 23, 12, 2), (2, 5, 4, 3), (3, 4, 4, 2), (24, 60, 1, 1)],
)
def test_an_update_is_divided_over_processes_and_batches(processes, most, batch_size, accumulate, novel):
    data = data_of(novel, tokens_per_update=UPDATE, batch_size=most)
    joined(data, 0, processes, accumulate)
    for _ in range(2):  # twice, as for a second fit
        data.setup("fit")
        assert data.batch_size == batch_size


def test_a_trainer_that_accumulates_too_few_batches_is_told_how_many(novel):
    data = data_of(novel, tokens_per_update=UPDATE, batch_size=12)
    with pytest.raises(InputError, match=r"makes 2 batches an update: give .* accumulate_grad_batches=2"):
        joined(data).setup("fit")


@pytest.mark.parametrize(("device", "count"), [("cpu", 0), ("cuda", 2)])
def test_memory_is_pinned_for_the_device_that_trains(novel, monkeypatch, device, count):
    """A run on the CPU takes none, also where there is a GPU."""
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    next(iter(joined(data_of(novel), device=device).train_dataloader()))
    assert len(pinned) == count
