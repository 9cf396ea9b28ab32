"""Activation checkpointing and compilation: the same training."""

import copy

import pytest
import torch

from gpt import GPTConfig
from gpt.training import compilation
from gpt.training.loss import losses_in_place
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig

CONFIG = GPTConfig(vocab_size=64, context_length=16, emb_dim=32, num_heads=2, num_layers=2)
BATCH = torch.randint(0, 64, (2, 64, 16), generator=torch.Generator().manual_seed(1)).unbind()


def test_checkpointed_activations_take_a_third_of_the_memory_and_change_no_gradient():
    def kept_and_gradients(checkpointed: bool) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        module = LanguageModel(CONFIG, OptimizerConfig(), checkpoint_activations=checkpointed)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            loss = module.loss(BATCH)
        loss.backward()
        return sum(kept), [weight.grad for weight in module.model.parameters()]

    plain_kept, plain = kept_and_gradients(False)
    kept, gradients = kept_and_gradients(True)
    torch.testing.assert_close(gradients, plain, atol=1e-7, rtol=1e-5)
    assert kept < plain_kept / 3


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch's own tracing
def test_compiled_equals_eager_and_keeps_the_names():
    if not compilation.has_compiler():
        pytest.skip("no C++ compiler")
    torch.manual_seed(0)
    eager = LanguageModel(CONFIG, OptimizerConfig())
    compiled = copy.deepcopy(eager)
    compilation.compile_model(compiled)
    losses = [module.loss(BATCH) for module in (eager, compiled)]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    for mine, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-6, rtol=1e-4)
    assert list(eager.state_dict()) == list(compiled.state_dict())
    assert not any("_orig_mod" in name for name in compiled.state_dict())


def test_without_a_compiler_one_line_says_so(monkeypatch, recwarn):
    monkeypatch.setattr(compilation.shutil, "which", lambda name: None)
    module = LanguageModel(CONFIG, OptimizerConfig())
    compilation.compile_model(module)
    assert torch.isfinite(module.loss(BATCH))
    (warning,) = recwarn.list
    assert "there is no compiler" in str(warning.message)
    assert "\n" not in str(warning.message)


def test_the_compiler_is_the_one_that_torch_calls(monkeypatch):
    asked = []
    monkeypatch.setattr(compilation.shutil, "which", asked.append)
    monkeypatch.setenv("CXX", "/opt/gcc/bin/g++-13")
    assert not compilation.has_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("sys.platform", "darwin")
    assert not compilation.has_compiler()
    assert asked == ["/opt/gcc/bin/g++-13", "clang++"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_compiles_the_loss_too(device, monkeypatch):
    compiled = []

    def compile_block(block):
        compiled.append(block)

    monkeypatch.setattr(compilation, "has_compiler", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function) or function)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_block)
    monkeypatch.setattr(LanguageModel, "device", torch.device(device))
    module = LanguageModel(CONFIG, OptimizerConfig(), compile=True)
    compilation.compile_model(module)
    loss = [losses_in_place] if device == "cuda" else []
    assert compiled == [*loss, *module.model.blocks]
    assert (module.kernel is losses_in_place) == (device == "cuda")
