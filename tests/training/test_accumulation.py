"""The gradient of a step is that of the mean loss over all its batches, however they are cut."""

import json
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F

from gpt import GPTConfig
from gpt.data.module import TokenData
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig

CONFIG = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)


class Watch(pl.Callback):
    """Keeps each step's gradients, and what the whole of its batches, taken as one, would have given."""

    def __init__(self):
        self.batches, self.steps = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        weights = dict(pl_module.model.named_parameters())
        x, y = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        loss = F.cross_entropy(pl_module.model(x).flatten(0, 1), y.flatten())
        expected = torch.autograd.grad(loss, list(weights.values()))
        # Clipping is off, so that the gradients are as they were accumulated.
        self.steps.append(
            (
                len(self.batches),
                {name: w.grad.clone() for name, w in weights.items()},
                dict(zip(weights, expected, strict=True)),
            )
        )
        self.batches = []


@pytest.mark.parametrize(
    ("batch", "accumulate", "limit", "groups"),
    [(8, 1, 3, [1, 1, 1]), (4, 2, 6, [2, 2, 2])],
)
def test_gradients_are_those_of_all_batches_as_one(batch, accumulate, limit, groups, workplace):
    watch = Watch()
    trainer = pl.Trainer(
        max_epochs=1,
        limit_train_batches=limit,
        limit_val_batches=0,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = TokenData("text.txt", vocab_size=300, context_length=16, batch_size=batch)
    trainer.fit(LanguageModel(CONFIG, OptimizerConfig(), compile=False), data)
    assert [count for count, *_ in watch.steps] == groups
    for _, got, expected in watch.steps:
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_packed_batches_weigh_equally_whatever_their_padding(tmp_path, monkeypatch):
    """As docs/options.md says of examples: the gradient is the mean of the batches' means."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": "fox", "completion": "fox " * (1 + 5 * (k % 4))}) for k in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = TokenData("text.jsonl", vocab_size=300, context_length=16, batch_size=1, val_fraction=0.2)
    data.setup("fit")
    dataset = data.train_dataloader().dataset
    batches = [dataset[k] for k in range(4)]
    assert len({int((y != -100).sum()) for _, y in batches}) > 1
    module = LanguageModel(CONFIG, OptimizerConfig())
    trainer = SimpleNamespace(accumulate_grad_batches=4, num_training_batches=4, loggers=[])
    module._trainer, module.logs_itself = trainer, False
    for index, batch in enumerate(batches):
        (module.training_step(batch, index) / 4).backward()
    losses = [F.cross_entropy(module.model(x).flatten(0, 1), y.flatten()) for x, y in batches]
    weights = [weight for weight in module.parameters() if weight.grad is not None]
    expected = torch.autograd.grad(sum(losses) / 4, weights)
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, atol=1e-6, rtol=1e-4)
