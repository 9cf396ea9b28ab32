"""What a training step and a validation step of the LightningModule compute."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from tiny_runs import TINY
from torch.nn import functional as F

from gpt import GPTConfig
from gpt.cli import main
from gpt.data.module import TokenData
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig

CONFIG = GPTConfig(vocab_size=300, context_length=16, emb_dim=32, num_heads=2, num_layers=1)


class WithAuxiliaryTerm(LanguageModel):
    def loss(self, batch):
        return super().loss(batch) + 100.0


def trainer(**options):
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **options,
    )


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


@pytest.mark.parametrize("chunk", ["0", "-3"])
def test_a_loss_chunk_without_a_row_is_refused_in_one_line(chunk, workplace, capsys):
    assert main([*TINY, "--model.loss_chunk", chunk]) == 2
    assert capsys.readouterr().err == f"gpt fit: loss_chunk must be at least 1, got {chunk}\n"
