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
    targets[::7] = IGNORE_INDEX
    return features, weight, targets


def with_gradients(mean, *inputs) -> list[torch.Tensor]:
    return [mean, *torch.autograd.grad(mean, inputs)]


@pytest.mark.parametrize("chunk", [7, 1000], ids=["chunks", "all in one"])
def test_value_and_gradient_are_those_of_the_plain_loss(chunk):
    features, weight, targets = leaves(torch.float64)
    # Scaled, as when gradients accumulate.
    ours = with_gradients(linear_cross_entropy(features, weight, targets, chunk) * 0.25, features, weight)
    expected = with_gradients(F.cross_entropy(features @ weight.T, targets) * 0.25, features, weight)
    torch.testing.assert_close(ours[0], expected[0].float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1:], expected[1:], atol=1e-6, rtol=1e-5)


def test_under_autocast_the_error_is_that_of_the_plain_loss():
    features, weight, targets = leaves()
    exact = F.cross_entropy(features.double() @ weight.double().T, targets)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(features, weight, targets, 16)
        plain = F.cross_entropy((features @ weight.T).float(), targets)
    assert ours.dtype == torch.float32
    losses = (with_gradients(mean, features, weight) for mean in (ours, plain, exact))
    for mine, other, reference in zip(*losses, strict=True):
        assert (mine - reference).norm() < 1.5 * (other - reference).norm() + 1e-3 * reference.norm()


def test_only_the_gradients_that_are_needed():
    features, weight, targets = leaves()
    weight.requires_grad_(False)
    linear_cross_entropy(features, weight, targets).backward()
    assert features.grad is not None
    assert weight.grad is None


def test_without_gradients_no_kernel_computes_them():
    wanted = []

    def kernel(logits, targets, differentiate):
        wanted.append(differentiate)
        return loss.losses_in_place(logits, targets, differentiate)

    linear_cross_entropy(*leaves(), kernel=kernel)
    with torch.no_grad():
        linear_cross_entropy(*leaves(), kernel=kernel)
    assert wanted == [True, False]


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


def test_a_chunk_is_cut_for_the_cache_of_a_cpu_alone():
    """Elsewhere each part would be a dozen kernels more, a thousand parts per batch."""
    logits, targets = torch.zeros(50, 50304, device="meta"), torch.zeros(50, 1, device="meta").long()
    with Memory() as memory:
        loss._divided(logits, targets, False)
    assert memory.peak >= logits.nbytes


@pytest.mark.slow
def test_compiled_into_one_pass_it_is_the_same():
    """As on a GPU, with the last chunk shorter than the others."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    features, weight, targets = leaves()
    with torch.autocast("cpu", torch.bfloat16):
        compiled, eager = (
            with_gradients(linear_cross_entropy(features, weight, targets, 20, kernel), features, weight)
            for kernel in (torch.compile(loss.losses_in_place), None)
        )
    torch.testing.assert_close(compiled, eager, atol=1e-7, rtol=1e-6)


def test_float16_keeps_the_gradients_of_many_rows():
    """Each row's share of the mean is below what float16 can hold; the loss is scaled only later."""
    features, weight = torch.randn(20_000, 16), torch.randn(97, 16) * 0.1
    inputs = features.requires_grad_(), weight.requires_grad_()
    targets = torch.randint(0, 97, (20_000,))
    targets[::7] = IGNORE_INDEX
    exact = F.cross_entropy(features.double() @ weight.double().T, targets)
    with torch.autocast("cpu", torch.float16):
        ours = linear_cross_entropy(features, weight, targets)
    losses = (with_gradients(mean * 65536.0, *inputs) for mean in (ours, exact))
    for result, expected in zip(*losses, strict=True):
        assert (result - expected).norm() < 1e-3 * expected.norm()


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
    head = change(nn.Linear(16, 97, bias=False))
    assert is_matrix(head) == (change is HEADS["a matrix"])
    features, _, targets = leaves()
    inputs = [features, *head.parameters()]
    ours = with_gradients(head_cross_entropy(head, features, targets, chunk=16), *inputs)
    expected = with_gradients(F.cross_entropy(head(features), targets), *inputs)
    torch.testing.assert_close(ours, expected)
    assert head_cross_entropy(head, features, torch.full_like(targets, IGNORE_INDEX)).isnan()


def test_a_head_that_is_no_matrix_never_has_all_logits_in_memory():
    sizes, saved = [], []
    head = nn.Linear(16, 97, bias=False)
    head.register_forward_hook(lambda module, args, logits: sizes.append(len(logits)))
    features, _, targets = leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        head_cross_entropy(head, features, targets, chunk=16).backward()
    assert max(sizes) == 16 and sum(sizes) == 2 * 50  # once more in the backward pass
    assert (16, 97) not in saved
