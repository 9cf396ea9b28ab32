"""What a training step and a validation step of the LightningModule compute."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from tiny_runs import fit, trainer
from torch.nn import functional as F

from gpt import GPTConfig
from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig
from gpt.weights.checkpoint import read

CONFIG = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)


class WithAuxiliaryTerm(LanguageModel):
    def loss(self, batch):
        return super().loss(batch) + 100.0


def test_validation_measures_the_cross_entropy_alone(workplace):
    data = TokenData("text.txt", vocab_size=300, context_length=16, batch_size=4)
    module = WithAuxiliaryTerm(CONFIG, OptimizerConfig(), compile=False)
    validation = trainer()
    validation.validate(module, data, verbose=False)
    x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader(), strict=True))
    with torch.no_grad():
        expected = F.cross_entropy(module.eval()(x).flatten(0, 1), y.flatten()).item()
    assert float(validation.callback_metrics["val_loss"]) == pytest.approx(expected, rel=1e-5)
    trainer(max_steps=1, limit_val_batches=0).fit(module.train(), data)
    assert module.last_loss > 100


@pytest.mark.parametrize(("limit", "steps"), [({"max_steps": 1}, 1), ({"max_epochs": 2}, 18)])
def test_the_schedule_ends_with_any_trainer(limit, steps, workplace):
    data = TokenData("text.txt", vocab_size=300, context_length=16, batch_size=74)
    module = LanguageModel(CONFIG, OptimizerConfig(), compile=False)
    own = trainer(limit_val_batches=0, **limit)
    own.fit(module, data)
    assert module.planned_steps == own.global_step == steps
    assert own.callback_metrics["train_loss"] == module.last_loss


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_float16_gradients_are_unscaled_before_they_are_clipped(optimizer, workplace):
    norms = []
    for plugins in ([], [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]):
        torch.manual_seed(0)
        data = TokenData("text.txt", vocab_size=300, context_length=16, batch_size=4)
        module = LanguageModel(CONFIG, OptimizerConfig(name=optimizer), compile=False)
        trainer(max_steps=1, limit_val_batches=0, gradient_clip_val=1.0, plugins=plugins).fit(module, data)
        norms.append(float(module.last_gradient_norm))
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_gradients_are_clipped_by_the_norm_of_all(clip):
    module = LanguageModel(CONFIG)
    module.last_loss = torch.tensor(1.0)
    module._trainer = SimpleNamespace(
        precision_plugin=None,
        strategy=SimpleNamespace(reduce=lambda tensor, reduce_op: tensor),
        global_step=0,
        accumulate_grad_batches=1,
    )
    for weight in module.parameters():
        weight.grad = torch.randn_like(weight)
    before = torch.cat([weight.grad.flatten() for weight in module.parameters()])
    module.configure_gradient_clipping(torch.optim.SGD(module.parameters(), lr=0.1), clip)
    after = torch.cat([weight.grad.flatten() for weight in module.parameters()])
    assert module.last_gradient_norm == pytest.approx(before.norm().item(), rel=1e-5)
    expected = before * 0.5 / before.norm() if clip == 0.5 else before
    torch.testing.assert_close(after, expected)


def test_clipping_by_value_is_refused():
    with pytest.raises(InputError, match="gradients are clipped by norm"):
        LanguageModel(CONFIG).configure_gradient_clipping(None, 1.0, "value")


def test_documents_are_kept_apart():
    module = LanguageModel(CONFIG)
    x, y = torch.randint(0, 300, (2, 2, 16)).unbind()
    documents = torch.tensor([[0] * 7 + [1] * 9, [0] * 16])
    expected = F.cross_entropy(module(x).flatten(0, 1), y.flatten())
    torch.testing.assert_close(module.loss((x, y)), expected)
    apart = F.cross_entropy(module.model(x, document_ids=documents).flatten(0, 1), y.flatten())
    torch.testing.assert_close(module.loss((x, y, documents)), apart)
    assert not torch.isclose(apart, expected)


def test_isolated_documents_change_what_is_learned(workplace):
    rows = (json.dumps({"text": f"a fox of {n} tails"}) + "\n" for n in range(300))
    Path("rows.jsonl").write_text("".join(rows), encoding="utf-8")
    short = ["--data.corpus", "rows.jsonl", "--trainer.max_steps", "2", "--snapshot_megabytes", "0"]
    weights = []
    for isolate in ("false", "true"):
        assert fit(*short, "--data.isolate", isolate, "--run", isolate) == 0
        weights.append(read(f"runs/{isolate}/checkpoints/last.safetensors").weights)
    name = "blocks.0.attention.W_key.weight"
    assert not torch.allclose(weights[0][name], weights[1][name], atol=1e-4)


@pytest.mark.parametrize("sampled", [1, 4])
def test_what_is_added_to_the_head_is_trained(sampled, workplace):
    data = TokenData("text.txt", vocab_size=300, context_length=16, batch_size=4)
    module = LanguageModel(CONFIG, OptimizerConfig(name="adamw"), sampled_softmax=sampled)
    module.model.head.bias = torch.nn.Parameter(torch.zeros(300))
    own = trainer(max_steps=5, limit_val_batches=0)
    if sampled > 1:
        with pytest.raises(InputError, match="needs a head that is a plain matrix"):
            own.fit(module, data)
        return
    own.fit(module, data)
    assert module.model.head.bias.abs().min() > 0
