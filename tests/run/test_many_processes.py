"""What each of 64 processes holds, and compiled blocks under DDP: process groups that send nothing."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpt import GPT, GPTConfig
from gpt.training import compilation
from gpt.training.module import LanguageModel
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.shard import ShardedStrategy, shard

# More matrices than processes: torch's fake group refuses to receive where it sends nothing.
CONFIG = GPTConfig(vocab_size=300, context_length=16, emb_dim=64, num_heads=2, num_layers=11)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[int]:
    """One process of the number that the test asks for."""
    rank, processes = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    yield rank
    dist.destroy_process_group()


def rows(whole: int, rank: int, processes: int = 64) -> int:
    """Those of a matrix that a process has: as many as the first has, while there are any."""
    most = (whole + processes - 1) // processes
    return min(most, max(0, whole - rank * most))


@pytest.mark.slow
@pytest.mark.parametrize("group", [(0, 64), (47, 64), (63, 64)], indirect=True)
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_one_of_64_processes_holds_a_64th(group, name):
    model = GPT(CONFIG)
    whole = {key: weight.shape for key, weight in model.named_parameters()}
    shard(model, init_device_mesh("cpu", (64,)), "32-true")
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        most = max(most, sum(not isinstance(next(block.parameters()), DTensor) for block in model.blocks))

    for block in model.blocks:
        block.attention.register_forward_hook(count)
    for _ in range(2):
        model.features(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
        optimizer.step()
    assert most == 1  # blocks that are whole at a time

    expected = {key: (rows(shape[0], group), *shape[1:]) for key, shape in whole.items()}
    numbers = 0
    for key, weight in model.named_parameters():
        states = [value for value in optimizer.state[weight].values() if value.dim()]
        for tensor in (weight, weight.grad, *states):
            assert tensor.shape == whole[key]
            assert tensor.to_local().shape == expected[key]
            numbers += tensor.to_local().numel()
        muon = name == "muon" and key.startswith("blocks.") and weight.dim() == 2
        assert len(states) == (1 if muon else 2)
    # Weights, gradients and moments; the first process has at most a row of each more than its share.
    total = sum(shape.numel() for shape in whole.values())
    matrices = sum(
        shape.numel() for key, shape in whole.items() if key.startswith("blocks.") and len(shape) == 2
    )
    share = (4 * total - (matrices if name == "muon" else 0)) / 64
    slack = 4 * sum(shape.numel() // shape[0] for shape in whole.values())
    assert numbers <= share + slack


@pytest.mark.parametrize("group", [(0, 2)], indirect=True)
def test_gradients_are_reduced_in_the_last_backward_pass_of_an_update(group, config):
    model = GPT(config)
    shard(model, init_device_mesh("cpu", (2,)), "32-true")
    strategy = ShardedStrategy()
    strategy._lightning_module = SimpleNamespace(model=model)

    def backward() -> list[bool]:
        """Which weights have a gradient afterwards: those whose gradient was reduced."""
        model.features(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
        return [weight.grad is not None for weight in model.parameters()]

    for _ in range(2):
        with strategy.block_backward_sync():
            assert not any(backward())
    assert all(backward())


@pytest.mark.parametrize(
    ("device", "precision", "exchanged"),
    [("cpu", "bf16-mixed", None), ("cuda", "32-true", None), ("cuda", "bf16-mixed", torch.bfloat16)],
)
def test_gpus_exchange_weights_in_the_type_that_they_compute_in(
    device, precision, exchanged, monkeypatch, config
):
    policies = []
    monkeypatch.setattr(
        "torch.distributed.fsdp.fully_shard", lambda module, mesh, mp_policy: policies.append(mp_policy)
    )
    monkeypatch.setattr("torch.distributed.fsdp.register_fsdp_forward_method", lambda *_: None)
    model = GPT(config)
    shard(model, SimpleNamespace(device_type=device), precision)
    assert len(policies) == len(model.blocks) + 1
    assert {policy.param_dtype for policy in policies} == {exchanged}
    assert {policy.reduce_dtype for policy in policies} == {exchanged and torch.float32}


@pytest.mark.parametrize("group", [(0, 2)], indirect=True)
@torch._dynamo.config.patch(optimize_ddp=True)  # monkeypatch would delete it from Dynamo's config afterwards
def test_ddp_does_not_split_a_compiled_block(group, monkeypatch, config):
    """Dynamo would divide a block's graph where a bucket of DDP is full, here at every few weights."""
    monkeypatch.setattr(compilation, "missing_compiler", lambda device: None)
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def compile_with_keep(block: torch.nn.Module) -> None:
        block._compiled_call_impl = torch.compile(block._call_impl, backend=keep)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_with_keep)
    torch._dynamo.reset()
    module = LanguageModel(config)
    compilation.compile_model(module)
    DistributedDataParallel(module.model, bucket_cap_mb=0.001)(torch.zeros(2, 8, dtype=torch.int64))
    torch._dynamo.reset()
    assert len(graphs) == 1
