"""Compiled blocks under DDP: a process group that sends nothing."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpt.training import compilation
from gpt.training.module import LanguageModel


@torch._dynamo.config.patch(optimize_ddp=True)  # monkeypatch would delete it from Dynamo's config afterwards
def test_ddp_does_not_split_a_compiled_block(monkeypatch, config):
    """Dynamo would divide a block's graph where a bucket of DDP is full, here at every few weights."""
    monkeypatch.setattr(compilation, "missing_compiler", lambda device: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
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
    dist.destroy_process_group()
    assert len(graphs) == 1
