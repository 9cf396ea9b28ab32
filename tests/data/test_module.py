import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional

from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.text.tokenizer import Tokenizer


class Tiny(pl.LightningModule):
    """A bigram table that remembers what it was shown."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(300, 300)
        self.seen = []
        self.nats = self.targets = 0.0

    def training_step(self, batch, batch_idx):
        x, y = batch[:2]
        self.seen.append(x.clone())
        return functional.cross_entropy(self.table(x).flatten(0, 1), y.flatten())

    def validation_step(self, batch, batch_idx):
        x, y = batch[:2]
        self.nats += float(
            functional.cross_entropy(self.table(x).flatten(0, 1), y.flatten(), reduction="sum")
        )
        self.targets += int((y >= 0).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(folder, data, steps, checkpoint=None, **options):
    model = Tiny()
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(model, data, ckpt_path=checkpoint, weights_only=True)
    trainer.save_checkpoint(folder / "last.safetensors")
    return model


@pytest.fixture
def novel(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text(
        " ".join(f"chapter {i} of caf\u00e9 {i * i * 7919}" for i in range(130)), encoding="utf-8"
    )
    return str(path)


def data_of(novel, **options):
    return TokenData(novel, **{"vocab_size": 300, "context_length": 16, "batch_size": 4, **options})


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 7}, {"accumulate_grad_batches": 3}], ids=str)
def test_a_resumed_run_sees_the_same_batches(novel, tmp_path, options):
    options["limit_val_batches"] = 0

    def data():
        return data_of(novel, shift=True)

    batches = len(data().train_dataloader())
    assert 20 < batches < 60
    steps = 2 * batches // options.get("accumulate_grad_batches", 1)
    whole = fit(tmp_path, data(), steps, **options)
    for stop in (5, steps // 2, steps - 3):  # inside an epoch, at or near an end, inside the last
        first = fit(tmp_path, data(), stop, **options)
        second = fit(tmp_path, data(), steps, tmp_path / "last.safetensors", **options)
        seen = first.seen + second.seen
        assert len(seen) == len(whole.seen)
        assert all(torch.equal(a, b) for a, b in zip(seen, whole.seen, strict=True))
        assert torch.equal(second.table.weight, whole.table.weight)


def test_an_epoch_has_every_window_once_across_loader_iterations(novel):
    data = data_of(novel, batch_size=5)
    loader = data.train_dataloader()
    windows = data.prepared.counts["train"].tokens // 16
    assert windows % 5
    rows = torch.cat([y for _ in range(5) for _, y in loader])
    for epoch in range(4):
        assert len({tuple(row) for row in rows[epoch * windows : (epoch + 1) * windows].tolist()}) == windows
    assert loader.state_dict() == {"windows": len(rows)}
    state = {"windows": 10}
    loader.load_state_dict(state)
    assert torch.equal(next(iter(loader))[1], rows[10:15])


def test_a_small_corpus_trains_or_names_both_lengths(tmp_path):
    text = "To be, or not to be, that is the question. " * 100
    tokenizer = Tokenizer("gpt2", vocab_size=300)
    text = tokenizer.decode(tokenizer.encode(text)[:299])
    path = tmp_path / "small.txt"
    path.write_text(text, encoding="utf-8")
    data = data_of(str(path), context_length=128, batch_size=12)
    train, val = (data.prepared.counts[split] for split in ("train", "val"))
    assert train.tokens + val.tokens == 299 + train.documents + val.documents  # an end of text each
    model = fit(tmp_path, data, 2, val_check_interval=1)
    assert math.isfinite(model.nats)
    assert model.targets == 2 * data.prepared.counts["val"].tokens
    with pytest.raises(InputError, match=r"27\d tokens, fewer than the context_length of 512"):
        data_of(str(path), context_length=512).train_dataloader()


def test_validation_covers_the_bytes_held_out(novel):
    data = data_of(novel, val_fraction=0.2)
    targets = torch.cat([y.flatten() for _, y in data.val_dataloader()])
    targets = targets[targets >= 0]
    assert len(targets) == data.prepared.counts["val"].tokens
    assert targets[-1] == data.tokenizer.eot
    text = data.tokenizer.decode_bytes(targets[targets != data.tokenizer.eot].tolist())
    assert len(text) == data.prepared.counts["val"].scored_bytes


def test_a_prepared_folder_is_a_corpus_and_its_vocabulary_is_checked(novel):
    data = data_of(novel)
    data.setup("fit")
    again = data_of(str(data.prepared.folder))
    assert torch.equal(next(iter(again.train_dataloader()))[0], next(iter(data.train_dataloader()))[0])
    with pytest.raises(InputError, match="vocab_size 300, not 400"):
        data_of(str(data.prepared.folder), vocab_size=400).setup("fit")


@pytest.mark.parametrize(
    ("processes", "most", "batch_size", "accumulate"),
    [
        (1, 24, 24, 1),
        (1, 23, 12, 2),
        (2, 24, 12, 1),
        (2, 5, 4, 3),
        (3, 4, 4, 2),
        (8, 2, 1, 3),
        (24, 60, 1, 1),
    ],
)
def test_an_update_is_divided_over_processes_and_batches(processes, most, batch_size, accumulate, novel):
    data = data_of(novel, tokens_per_update=24 * 16, batch_size=most)
    data.trainer = SimpleNamespace(world_size=processes, accumulate_grad_batches=accumulate)
    for _ in range(2):  # twice, as for a second fit
        data.setup("fit")
        assert data.batch_size == batch_size


def test_a_trainer_that_accumulates_another_number_of_batches_is_told_which(novel):
    data = data_of(novel, tokens_per_update=24 * 16, batch_size=12)
    data.trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=1)
    with pytest.raises(InputError, match="makes 2 batches an update: give the Trainer accumulate_grad_batc"):
        data.setup("fit")


def test_processes_that_cannot_share_an_update_are_told_which_they_can(novel):
    data = data_of(novel, tokens_per_update=24 * 16)
    data.trainer = SimpleNamespace(world_size=5, accumulate_grad_batches=1)
    with pytest.raises(InputError, match="384 is no multiple of 80, a window on each process: give 400"):
        data.setup("fit")


def test_memory_is_pinned_for_the_device_that_trains(novel, monkeypatch):
    """A run on the CPU takes none, also where there is a GPU."""
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    for device, count in (("cpu", 0), ("cuda", 2)):
        data = data_of(novel)
        place = {"global_rank": 0, "world_size": 1, "accumulate_grad_batches": 1}
        data.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)), **place)
        next(iter(data.train_dataloader()))
        assert len(pinned) == count


TWO_PROCESSES = """
import json, os, sys, warnings
warnings.filterwarnings("ignore")
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from test_module import data_of, fit
data = data_of(sys.argv[1], batch_size=3, val_fraction=0.11)
model = fit(Path(sys.argv[2]), data, 30, strategy="ddp", devices=2, val_check_interval=30)
rank = data.trainer.global_rank
Path(sys.argv[2], f"rank{rank}.json").write_text(json.dumps(
    {"seen": [x.tolist() for x in model.seen], "targets": model.targets,
     "batches": len(data.train_dataloader())}), encoding="utf-8")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo")
def test_two_processes_share_an_epoch_without_overlap(novel, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
    ]
    done = subprocess.run(
        [*command, novel, str(tmp_path), os.path.dirname(__file__)],
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    assert [len(rank["seen"]) for rank in ranks] == [30, 30]
    windows = [
        tuple(row) for batch in zip(*(r["seen"] for r in ranks), strict=True) for x in batch for row in x
    ]
    alone = data_of(novel, batch_size=6, val_fraction=0.11)
    count = alone.prepared.counts["train"].tokens // 16
    assert ranks[0]["batches"] == ranks[1]["batches"] == -(-count // 6) < 30
    expected = [
        tuple(row)
        for _, (x, _) in zip(range(30), repeat(alone.train_dataloader()), strict=False)
        for row in x.tolist()
    ]
    assert windows == expected
    assert len(set(windows[:count])) == count
    assert sum(rank["targets"] for rank in ranks) == alone.prepared.counts["val"].tokens


def repeat(loader):
    while True:
        yield from loader
