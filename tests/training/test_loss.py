import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpt.data.windows import IGNORE_INDEX
from gpt.training import loss
from gpt.training.compilation import has_compiler
from gpt.training.loss import head_cross_entropy, is_matrix, linear_cross_entropy


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
    """Notes the most bytes of new tensors that existed at the same time."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = {arg.untyped_storage()._cdata for arg in tree_leaves((args, kwargs)) if torch.is_tensor(arg)}
        result = operator(*args, **(kwargs or {}))
        self.live = {key: live for key, live in self.live.items() if not live[0].expired()}
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def test_memory_holds_the_logits_of_one_chunk_and_no_second_buffer_for_their_gradient():
    """A chunk of 32 MB, of which the softmax takes 2 MB at a time."""
    features, weight = torch.randn(2048, 2, requires_grad=True), torch.randn(8192, 2, requires_grad=True)
    targets = torch.randint(0, 8192, (2048,))
    with Memory() as memory:
        linear_cross_entropy(features, weight, targets, chunk=1024)
    of_one_chunk = 1024 * 8192 * 4
    assert of_one_chunk < memory.peak < 1.5 * of_one_chunk


@pytest.mark.parametrize(("device", "rows"), [("cpu", 10), ("meta", 50)])
def test_a_chunk_is_cut_for_the_cache_of_a_cpu_alone(device, rows):
    """Elsewhere each part would be a dozen kernels more, a thousand parts per batch."""
    logits, targets = torch.zeros(50, 50304, device=device), torch.zeros(50, 1, device=device).long()
    with Memory() as memory:
        loss._in_cache(logits, targets, False)
    assert rows <= memory.peak / (50304 * 4) < rows + 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_compiled_into_one_pass_it_is_the_same(precision):
    """As on a GPU, with the last chunk shorter than the others."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    features, weight, targets = leaves()
    targets[3] = -100

    def loss_and_gradients(kernel) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            mean = linear_cross_entropy(features, weight, targets, 20, kernel)
        return [mean, *torch.autograd.grad(mean, [features, weight])]

    compiled = loss_and_gradients(torch.compile(loss.cross_entropy))
    for ours, eager in zip(compiled, loss_and_gradients(None), strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-7, rtol=1e-6)


def test_float16_keeps_the_gradients_of_many_rows():
    """Each row's share of the mean is below what float16 can hold; the loss is scaled only later."""
    features, weight = torch.randn(20_000, 16), torch.randn(97, 16) * 0.1
    targets = torch.randint(0, 97, (20_000,))
    targets[::7] = -100

    def loss_and_gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in (features, weight)]
        with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
            mean = linear_cross_entropy(*inputs, targets)
        return [mean, *torch.autograd.grad(mean * 65536.0, inputs)]

    exact, ours = loss_and_gradients(torch.float64), loss_and_gradients(torch.float32)
    for expected, result in zip(exact, ours, strict=True):
        assert (result.double() - expected).norm() < 1e-3 * expected.norm()


def hooked(matrix: nn.Linear) -> nn.Linear:
    matrix.register_forward_hook(lambda module, args, logits: 3 * torch.tanh(logits / 3))
    return matrix


def overridden(matrix: nn.Linear) -> nn.Linear:
    matrix.forward = lambda x: F.linear(2 * x, matrix.weight)
    return matrix


HEADS = {
    "a matrix": lambda matrix: matrix,
    "a bias": lambda matrix: nn.Linear(matrix.in_features, matrix.out_features),
    "a module": lambda matrix: nn.Sequential(matrix, nn.Tanh()),
    "a hook": hooked,
    "a parametrization": nn.utils.parametrizations.weight_norm,
    "a forward of its own": overridden,
}


@pytest.mark.parametrize("change", HEADS.values(), ids=HEADS)
def test_the_loss_is_that_of_what_the_head_computes(change):
    matrix = nn.Linear(24, 70, bias=False)
    assert is_matrix(matrix)
    head = change(matrix)
    assert is_matrix(head) == (change is HEADS["a matrix"])
    features = torch.randn(50, 24, requires_grad=True)
    targets = torch.randint(0, 70, (50,))
    targets[::7] = IGNORE_INDEX

    ours = head_cross_entropy(head, features, targets, chunk=16)
    expected = F.cross_entropy(head(features), targets, ignore_index=IGNORE_INDEX)

    torch.testing.assert_close(ours, expected)
    inputs = [features, *head.parameters()]
    torch.testing.assert_close(torch.autograd.grad(ours, inputs), torch.autograd.grad(expected, inputs))
    with torch.no_grad():
        torch.testing.assert_close(head_cross_entropy(head, features, targets), expected)
    assert head_cross_entropy(head, features, torch.full_like(targets, IGNORE_INDEX)).isnan()


def test_a_head_that_is_no_matrix_never_has_all_logits_in_memory():
    sizes = []
    head = nn.Linear(24, 70, bias=False)
    head.register_forward_hook(lambda module, args, logits: sizes.append(len(logits)))
    features = torch.randn(50, 24, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        head_cross_entropy(head, features, torch.randint(0, 70, (50,)), chunk=16).backward()
    assert max(sizes) == 16 and sum(sizes) == 2 * 50  # once more in the backward pass
    assert (16, 70) not in saved
