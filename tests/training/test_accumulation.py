"""The gradient of a step is that of the mean loss over all its batches, however they are cut."""

import json
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from gpt import GPTConfig
from gpt.data.module import TokenData
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig

CONFIG = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)


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
