"""The gradient of a step is that of the mean loss over all its batches, however they are cut."""

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F

from gpt import GPTConfig
from gpt.data.module import TokenData
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig


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
    [(8, 1, 3, [1, 1, 1]), (4, 2, 6, [2, 2, 2]), (2, 3, 7, [3, 3, 1]), (2, 4, 6, [4, 2])],
)
def test_gradients_are_those_of_all_batches_as_one(batch, accumulate, limit, groups, workplace):
    config = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)
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
    trainer.fit(LanguageModel(config, OptimizerConfig(), compile=False), data)
    assert [count for count, *_ in watch.steps] == groups
    for _, got, expected in watch.steps:
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
