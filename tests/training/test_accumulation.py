"""The gradient of a step is that of the mean loss over all its scored tokens, however they are cut."""

import json
from itertools import islice
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from gpt import GPTConfig
from gpt.data.module import TokenData
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig

CONFIG = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)


def test_every_scored_token_of_an_update_weighs_the_same(tmp_path, monkeypatch):
    """Also where the batches that are accumulated have more or fewer of them."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"prompt": "fox", "completion": "fox " * (1 + 5 * (k % 4))}) for k in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    data = TokenData("text.jsonl", vocab_size=300, context_length=16, batch_size=1, val_fraction=0.2)
    module = LanguageModel(CONFIG, OptimizerConfig())
    trainer = SimpleNamespace(
        accumulate_grad_batches=4,
        num_training_batches=4,
        log_every_n_steps=0,
        global_rank=0,
        world_size=1,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    data.trainer = trainer
    data.setup("fit")
    batches = list(islice(data.train_dataloader(), 4))
    assert len({int((y != -100).sum()) for _, y, *_ in batches}) > 1
    module._trainer = trainer
    for index, batch in enumerate(batches):
        (module.training_step(batch, index) / 4).backward()
    logits = torch.cat([module.model(x).flatten(0, 1) for x, *_ in batches])
    loss = F.cross_entropy(logits, torch.cat([y.flatten() for _, y, *_ in batches]))
    weights = [weight for weight in module.parameters() if weight.grad is not None]
    expected = torch.autograd.grad(loss, weights)
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, atol=1e-6, rtol=1e-4)
