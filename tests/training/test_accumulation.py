"""The gradient of a step is that of the mean loss over all its scored tokens, however they are cut."""

import copy
import json
from pathlib import Path

import torch
from tiny_runs import Gradients, trainer
from torch.nn import functional as F

from gpt import GPTConfig
from gpt.data.module import TokenData
from gpt.data.windows import IGNORE_INDEX
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig

CONFIG = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)


class Noting(LanguageModel):
    """Keeps its batches."""

    def loss(self, batch):
        self.batches.append(batch)
        return super().loss(batch)


def test_every_scored_token_of_an_update_weighs_the_same(workplace):
    """Also where the batches that are accumulated have more or fewer of them."""
    rows = [{"prompt": "fox", "completion": "fox " * (1 + 5 * (k % 4))} for k in range(40)]
    Path("text.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    data = TokenData("text.jsonl", vocab_size=300, context_length=16, batch_size=1, val_fraction=0.2)
    module, gradients = Noting(CONFIG, OptimizerConfig(), compile=False), Gradients()
    module.batches = []
    model = copy.deepcopy(module.model)

    once = trainer(max_steps=1, accumulate_grad_batches=4, limit_val_batches=0, callbacks=[gradients])
    once.fit(module, data)

    x, y = (torch.cat(parts) for parts in list(zip(*module.batches, strict=True))[:2])
    assert len(module.batches) == 4
    assert len({int((y != IGNORE_INDEX).sum()) for _, y, *_ in module.batches}) > 1
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    expected = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.cat([gradient.flatten() for gradient in expected])
    torch.testing.assert_close(gradients.last, expected, atol=1e-6, rtol=1e-4)
