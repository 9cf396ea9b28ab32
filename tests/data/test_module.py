"""The data module as a Trainer uses it: each window once an epoch, also when it is resumed."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from corpora import write
from tiny_runs import trainer
from torch.nn import functional

from gpt.data.module import TokenData
from gpt.errors import InputError


class Tiny(pl.LightningModule):
    """A bigram table that remembers what it was shown."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(300, 300)
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen.append(x.clone())
        return functional.cross_entropy(self.table(x).flatten(0, 1), y.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(folder, data, steps, checkpoint=None, **options) -> Tiny:
    """Train up to a step, and save last.safetensors in the folder."""
    model = Tiny()
    fitting = trainer(max_steps=steps, max_epochs=-1, limit_val_batches=0, default_root_dir=folder, **options)
    fitting.fit(model, data, ckpt_path=checkpoint, weights_only=True)
    fitting.save_checkpoint(folder / "last.safetensors")
    return model


@pytest.fixture
def novel(tmp_path) -> str:
    words = [f"chapter {i} of caf\u00e9 {i * i * 7919}" for i in range(130)]
    return str(write(tmp_path / "novel.txt", " ".join(words)))


def data_of(novel, **options) -> TokenData:
    return TokenData(novel, **{"vocab_size": 300, "context_length": 16, "batch_size": 4, **options})


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 7}, {"accumulate_grad_batches": 3}], ids=str)
def test_a_resumed_run_sees_the_same_batches(novel, tmp_path, options):
    batches = len(data_of(novel, shift=True).train_dataloader())
    assert 20 < batches < 60
    steps = 2 * batches // options.get("accumulate_grad_batches", 1)
    whole = fit(tmp_path, data_of(novel, shift=True), steps, **options)
    for stop in (5, steps // 2, steps - 3):  # inside an epoch, at or near an end, inside the last
        first = fit(tmp_path, data_of(novel, shift=True), stop, **options)
        checkpoint = tmp_path / "last.safetensors"
        second = fit(tmp_path, data_of(novel, shift=True), steps, checkpoint, **options)
        assert torch.equal(torch.stack(first.seen + second.seen), torch.stack(whole.seen))
        assert torch.equal(second.table.weight, whole.table.weight)


def test_a_small_corpus_trains_or_both_lengths_are_named(tmp_path):
    path = str(write(tmp_path / "small.txt", "To be, or not to be, that is the question. " * 12))
    x, _ = next(iter(data_of(path, context_length=128, batch_size=12).train_dataloader()))
    assert x.shape == (12, 128)
    with pytest.raises(InputError, match=r"3\d\d tokens, fewer than the context_length of 512"):
        data_of(path, context_length=512).train_dataloader()


def test_a_prepared_folder_is_a_corpus_and_its_vocabulary_is_checked(novel):
    data = data_of(novel)
    again = data_of(str(data.prepared.folder))
    assert torch.equal(next(iter(again.train_dataloader()))[0], next(iter(data.train_dataloader()))[0])
    with pytest.raises(InputError, match="vocab_size 300, not 400"):
        data_of(str(data.prepared.folder), vocab_size=400).setup("fit")


UPDATE = 24 * 16  # tokens, 24 windows


@pytest.mark.parametrize(
    ("processes", "most", "batch_size", "accumulate"),
    [(1, 24, 24, 1), (1, 23, 12, 2), (2, 5, 4, 3), (3, 4, 4, 2), (24, 60, 1, 1)],
)
def test_an_update_is_divided_over_processes_and_batches(processes, most, batch_size, accumulate, novel):
    data = data_of(novel, tokens_per_update=UPDATE, batch_size=most)
    data.trainer = SimpleNamespace(world_size=processes, accumulate_grad_batches=accumulate)
    for _ in range(2):  # twice, as for a second fit
        data.setup("fit")
        assert data.batch_size == batch_size


REFUSED = {
    "too few batches": (1, "makes 2 batches an update: give the Trainer accumulate_grad_batches=2"),
    "no whole windows": (5, "384 is no multiple of 80, a window on each process: give 400"),
}


@pytest.mark.parametrize(("processes", "message"), REFUSED.values(), ids=REFUSED)
def test_an_update_that_cannot_be_divided_says_what_can(processes, message, novel):
    data = data_of(novel, tokens_per_update=UPDATE, batch_size=12)
    data.trainer = SimpleNamespace(world_size=processes, accumulate_grad_batches=1)
    with pytest.raises(InputError, match=message):
        data.setup("fit")


@pytest.mark.parametrize(("device", "count"), [("cpu", 0), ("cuda", 2)])
def test_memory_is_pinned_for_the_device_that_trains(novel, monkeypatch, device, count):
    """A run on the CPU takes none, also where there is a GPU."""
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    data = data_of(novel)
    data.trainer = SimpleNamespace(
        global_rank=0,
        world_size=1,
        accumulate_grad_batches=1,
        strategy=SimpleNamespace(root_device=torch.device(device)),
    )
    next(iter(data.train_dataloader()))
    assert len(pinned) == count
