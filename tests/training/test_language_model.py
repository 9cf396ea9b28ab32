"""What a training step and a validation step of the LightningModule compute."""

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from tiny_runs import Gradients, trainer
from torch.nn import functional as F

from gpt import GPTConfig
from gpt.data.module import TokenData
from gpt.errors import InputError
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig

CONFIG = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)


@pytest.fixture
def data(workplace) -> TokenData:
    return TokenData("text.txt", vocab_size=300, context_length=16, batch_size=4)


class WithAuxiliaryTerm(LanguageModel):
    def loss(self, batch):
        return super().loss(batch) + 100.0


def test_validation_measures_the_cross_entropy_alone(data):
    module = WithAuxiliaryTerm(CONFIG, OptimizerConfig(), compile=False)
    validation = trainer()
    validation.validate(module, data, verbose=False)
    x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader(), strict=True))
    with torch.no_grad():
        expected = F.cross_entropy(module.eval()(x).flatten(0, 1), y.flatten()).item()
    assert float(validation.callback_metrics["val_loss"]) == pytest.approx(expected, rel=1e-5)
    trainer(max_steps=1, limit_val_batches=0).fit(module.train(), data)
    assert module.last_loss > 100


@pytest.mark.parametrize(
    ("limit", "steps"),
    [
        ({"max_steps": 1}, 1),
        ({"max_epochs": 2}, 18),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6),
        ({"max_epochs": 1, "limit_train_batches": 0.5}, 4),
        ({"max_epochs": 1, "limit_train_batches": 3, "accumulate_grad_batches": 2}, 2),
    ],
    ids=str,
)
def test_the_schedule_ends_with_any_trainer(limit, steps, workplace):
    data = TokenData("text.txt", vocab_size=300, context_length=16, batch_size=74)
    module = LanguageModel(CONFIG, OptimizerConfig(), compile=False)
    own = trainer(limit_val_batches=0, **limit)
    own.fit(module, data)
    assert module.total_steps == own.global_step == steps
    assert own.callback_metrics["train_loss"] == module.last_loss


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_float16_gradients_are_unscaled_before_they_are_clipped(optimizer, data):
    def norm(*plugins) -> float:
        torch.manual_seed(0)
        module = LanguageModel(CONFIG, OptimizerConfig(name=optimizer), compile=False)
        one_step = trainer(max_steps=1, limit_val_batches=0, gradient_clip_val=1.0, plugins=list(plugins))
        one_step.fit(module, data)
        return float(module.last_gradient_norm)

    scaled = norm(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")))
    assert scaled == pytest.approx(norm(), rel=0.02)


def test_gradients_are_clipped_by_the_norm_of_all(data):
    def gradients(clip: float | None) -> tuple[torch.Tensor, float]:
        torch.manual_seed(0)
        module, seen = LanguageModel(CONFIG, compile=False), Gradients()
        trainer(max_steps=1, limit_val_batches=0, gradient_clip_val=clip, callbacks=[seen]).fit(module, data)
        return seen.last, float(module.last_gradient_norm)

    whole, norm = gradients(None)
    assert norm == pytest.approx(whole.norm().item(), rel=1e-5)
    torch.testing.assert_close(gradients(norm / 2), (whole / 2, norm))
    torch.testing.assert_close(gradients(norm * 2), (whole, norm))


def test_clipping_by_value_is_refused():
    with pytest.raises(InputError, match="gradients are clipped by norm"):
        LanguageModel(CONFIG).configure_gradient_clipping(None, 1.0, "value")


def test_documents_are_kept_apart():
    module = LanguageModel(CONFIG)
    x, y = torch.randint(0, 300, (2, 2, 16)).unbind()
    documents = torch.tensor([[0] * 7 + [1] * 9, [0] * 16])
    apart = F.cross_entropy(module.model(x, document_ids=documents).flatten(0, 1), y.flatten())
    torch.testing.assert_close(module.loss((x, y, documents)), apart)
    assert not torch.isclose(module.loss((x, y)), apart)


def with_bias(**options) -> LanguageModel:
    module = LanguageModel(CONFIG, OptimizerConfig(name="adamw"), compile=False, **options)
    module.model.head.bias = torch.nn.Parameter(torch.zeros(300))
    return module


def test_what_is_added_to_the_head_is_trained(data):
    module = with_bias()
    trainer(max_steps=5, limit_val_batches=0).fit(module, data)
    assert module.model.head.bias.abs().min() > 0


def test_a_sampled_softmax_needs_a_head_that_is_a_matrix(data):
    with pytest.raises(InputError, match="needs a head that is a plain matrix"):
        trainer(max_steps=5, limit_val_batches=0).fit(with_bias(sampled_softmax=4), data)
