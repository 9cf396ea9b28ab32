import copy

import pytest
import torch
from torch.optim import AdamW, Muon

from gpt import GPT
from gpt.errors import InputError
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.optimizers.muon import StackedMuon


def test_stacked_muon_is_torchs_muon():
    shapes = [(8, 8), (8, 8), (32, 8), (8, 32), (8, 8)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = copy.deepcopy(ours)
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    stacked = StackedMuon(ours, dtype=torch.bfloat16, **options)
    torchs = Muon(theirs, **options, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        stacked.step()
        torchs.step()
    for mine, other in zip(ours, theirs, strict=True):
        # Newton-Schulz runs in bfloat16, whose products round in another order when they are batched.
        torch.testing.assert_close(mine, other, atol=2e-3, rtol=0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_the_precision_alone_decides_the_type_of_muon(precision, config):
    """Not the device: a T4 emulates bfloat16, many times slower, and trains in 16-mixed."""
    muon, _ = build_optimizer(GPT(config), OptimizerConfig(), precision).parts
    assert muon.optimizer.dtype is (torch.bfloat16 if precision == "bf16-mixed" else torch.float32)


def test_a_parameter_without_gradient_stays():
    first, second = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    before = second.detach().clone()
    first.grad = torch.randn(4, 4)
    StackedMuon([first, second], lr=0.1).step()
    assert torch.equal(second, before)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_recipe_is_its_parts_stepped_separately(name, config):
    model = GPT(config)
    reference = copy.deepcopy(model)
    shared = {"lr": 0.01, "weight_decay": 0.1}
    betas, momentum = (0.7, 0.8), 0.6  # no defaults
    recipe = OptimizerConfig(
        name=name, **shared, rest_lr=0.002, embedding_weight_decay=0.3, betas=betas, momentum=momentum
    )
    combined = build_optimizer(model, recipe)

    named = dict(reference.named_parameters())
    matrices = [named.pop(n) for n in list(named) if n.startswith("blocks.") and named[n].dim() == 2]
    if name == "muon":
        main = StackedMuon(matrices, **shared, momentum=momentum)
    else:
        main = AdamW(matrices, **shared, betas=betas, fused=True)
    embeddings = {"params": [p for p in named.values() if p.dim() == 2], "weight_decay": 0.3}
    norms_and_biases = {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0}
    rest = AdamW([embeddings, norms_and_biases], lr=0.002, betas=betas, fused=True)

    for _ in range(4):
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in (combined, main, rest):
            optimizer.step()
    for (weight, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, other), weight


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1"),
        ({"momentum": 1.5}, "momentum"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
    ids=str,
)
def test_bad_recipes_are_refused(setting, message):
    with pytest.raises(InputError, match=message):
        OptimizerConfig(**setting)
