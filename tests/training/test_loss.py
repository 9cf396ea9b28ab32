from collections import Counter

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpt.training import loss
from gpt.training.compilation import has_compiler
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
    ours = linear_cross_entropy(features, weight, targets, chunk)
    expected = F.cross_entropy(features @ weight.T, targets)
    torch.testing.assert_close(ours, expected.float(), atol=1e-5, rtol=1e-5)
    # Scaled, as when gradients accumulate.
    gradients = torch.autograd.grad(ours * 0.25, [features, weight])
    theirs = torch.autograd.grad(expected * 0.25, [features, weight])
    for mine, other in zip(gradients, theirs, strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


def test_under_autocast_the_error_is_that_of_the_plain_loss():
    features, weight, targets = leaves()
    exact = F.cross_entropy(features.double() @ weight.double().T, targets)
    exact_grads = torch.autograd.grad(exact, [features, weight])
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(features, weight, targets, 16)
        plain = F.cross_entropy((features @ weight.T).float(), targets)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(exact.item(), rel=1e-2)
    for mine, other, reference in zip(
        torch.autograd.grad(ours, [features, weight]),
        torch.autograd.grad(plain, [features, weight]),
        exact_grads,
        strict=True,
    ):
        assert (mine - reference).norm() < 1.5 * (other - reference).norm()


@pytest.mark.parametrize("half", [False, True])
def test_only_the_gradients_that_are_needed(half):
    features, weight, targets = leaves()
    weight.requires_grad_(False)
    with torch.autocast("cpu", torch.float16, enabled=half):
        loss = linear_cross_entropy(features, weight, targets)
    loss.backward()
    assert features.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(features, weight, targets).requires_grad


class Memory(TorchDispatchMode):
    """Counts calls by operator, and the most bytes of new tensors that existed at the same time."""

    def __init__(self):
        super().__init__()
        self.calls, self.live, self.peak = Counter(), {}, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = {arg.untyped_storage()._cdata for arg in tree_leaves((args, kwargs)) if torch.is_tensor(arg)}
        result = operator(*args, **(kwargs or {}))
        self.calls[operator.name()] += 1
        self.live = {key: live for key, live in self.live.items() if not live[0].expired()}
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def test_memory_holds_the_logits_of_one_chunk_and_no_second_buffer_for_their_gradient(monkeypatch):
    monkeypatch.setattr(loss, "_CACHED", 1)  # softmax over one row at a time
    features, weight = torch.randn(64, 2, requires_grad=True), torch.randn(4096, 2, requires_grad=True)
    targets = torch.randint(0, 4096, (64,))
    with Memory() as memory:
        linear_cross_entropy(features, weight, targets, chunk=16)
    of_one_chunk = 16 * 4096 * 4
    assert of_one_chunk < memory.peak < 1.5 * of_one_chunk


def test_a_chunk_is_cut_for_the_cache_of_a_cpu_alone(monkeypatch):
    """Elsewhere each part would be a dozen kernels more, a thousand parts per batch."""
    parts, cross_entropy = [], loss.cross_entropy
    monkeypatch.setattr(
        loss, "cross_entropy", lambda x, *more: parts.append(len(x)) or cross_entropy(x, *more)
    )
    for device, expected in (("cpu", [10, 10, 10, 10, 10]), ("meta", [50])):
        logits, target = torch.zeros(50, 50304, device=device), torch.zeros(50, 1, device=device).long()
        loss._in_cache(logits, target, True)
        assert parts == expected
        parts.clear()


@pytest.mark.slow
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_compiled_into_one_pass_it_is_the_same(precision):
    """As on a GPU, with the last chunk shorter than the others."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    features, weight, targets = leaves()
    targets[3] = -100
    found = []
    for kernel in (None, torch.compile(loss.cross_entropy)):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            ours = linear_cross_entropy(features, weight, targets, 20, kernel)
        found.append((ours, *torch.autograd.grad(ours, [features, weight])))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-7, rtol=1e-6)


def test_float16_keeps_the_gradients_of_many_rows():
    """Each row's share of the mean is below what float16 can hold; the loss is scaled only later."""
    features, weight = torch.randn(20_000, 16), torch.randn(97, 16) * 0.1
    targets = torch.randint(0, 97, (20_000,))
    targets[::7] = -100
    found = []
    for kind, held in ((torch.float64, torch.float64), (torch.float16, torch.float32)):
        inputs = [tensor.to(held).requires_grad_() for tensor in (features, weight)]
        with torch.autocast("cpu", torch.float16, enabled=kind == torch.float16):
            loss = linear_cross_entropy(*inputs, targets)
        found.append((loss, *torch.autograd.grad(loss * 65536.0, inputs)))
    for exact, ours in zip(*found, strict=True):
        assert (ours.double() - exact).norm() < 1e-3 * exact.norm()
