import pytest
import torch
from torch.nn import functional as F

from gpt.training.loss import linear_cross_entropy


def leaves(dtype=torch.float32):
    features = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(97, 16, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 97, (50,))
    return features, weight, targets


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
@pytest.mark.parametrize("padded", [0, 3])
def test_value_and_gradient_are_those_of_the_plain_loss(chunk, padded):
    features, weight, targets = leaves(torch.float64)
    targets[:padded] = -100
    loss = linear_cross_entropy(features, weight, targets, chunk)
    expected = F.cross_entropy(features @ weight.T, targets)
    torch.testing.assert_close(loss, expected.float(), atol=1e-5, rtol=1e-5)
    # A slope other than one, as when gradients accumulate.
    ours = torch.autograd.grad(loss * 0.25, [features, weight])
    theirs = torch.autograd.grad(expected * 0.25, [features, weight])
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


def test_under_autocast_it_is_as_near_as_the_plain_loss_is():
    features, weight, targets = leaves()
    exact = F.cross_entropy(features.double() @ weight.double().T, targets)
    exact_grads = torch.autograd.grad(exact, [features, weight])
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(features, weight, targets, 16)
        plain = F.cross_entropy((features @ weight.T).float(), targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    for mine, other, reference in zip(
        torch.autograd.grad(loss, [features, weight]),
        torch.autograd.grad(plain, [features, weight]),
        exact_grads,
        strict=True,
    ):
        assert (mine - reference).norm() < 1.5 * (other - reference).norm()


def test_only_the_gradients_that_are_needed():
    features, weight, targets = leaves()
    weight.requires_grad_(False)
    linear_cross_entropy(features, weight, targets).backward()
    assert features.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(features, weight, targets).requires_grad


def test_logits_far_from_zero_stay_finite():
    features, weight, targets = leaves()
    loss = linear_cross_entropy(features * 1000, weight, targets)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(features.grad).all()


def test_no_tensor_of_all_logits_is_made():
    """What autograd keeps is as large as the gradients, not as N x V."""
    kept = []
    features, weight, targets = leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        linear_cross_entropy(features, weight, targets, chunk=10)
    assert max(kept) <= weight.numel() < 50 * 97
