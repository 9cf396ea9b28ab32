"""Muon's matrices shared out: what each process gets, and that all get every update."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg

from gpt.training.optimizers.muon import StackedMuon
from gpt.training.optimizers.shares import divide, transform_shared

# Three and five processes share them unequally; of five, the last has no rows at all.
SHAPES = [(4, 4), (16, 4), (4, 16), (4, 4), (7, 3)]


def test_the_work_is_divided_evenly():
    """GPT-2 small's 24 wide matrices cost three times a square one: of 64 processes each has one of them at
    most, and the 48 squares are on the other 40."""
    block = [(768, 768)] * 4 + [(3072, 768), (768, 3072)]
    shapes = block * 12
    assert divide(shapes, 1) == [list(range(72))]
    for processes in (2, 8, 64):
        shares = divide(shapes, processes)
        assert sorted(number for share in shares for number in share) == list(range(72))
        work = [sum(1 if shapes[number] == (768, 768) else 3 for number in share) for share in shares]
        assert max(work) == max(3, (48 + 3 * 24) // processes)


def on_threads(processes: int, work: Callable[[int], object]) -> list[object]:
    """What `work(rank)` returns on each of so many threads, which torch takes for processes."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store, found = dist.HashStore(), SimpleQueue()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=processes, store=store)
            found.put((rank, work(rank)))
            dist.destroy_process_group()
        except BaseException as error:
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
            found.put((rank, error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(processes)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        multi_threaded_pg._uninstall_threaded_pg()
        multi_threaded_pg.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    results = sorted((found.get() for _ in threads), key=lambda pair: pair[0])
    for _, result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for _, result in results]


def matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape in SHAPES]


def swirl(stack: Tensor) -> Tensor:
    """Each element depends on all of its matrix; exact in bfloat16."""
    return (stack.sum(dim=(-2, -1), keepdim=True) * 3 + stack).bfloat16()


EXPECTED = [swirl(matrix[None])[0].float() for matrix in matrices()]


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
def test_every_process_gets_every_update_and_computes_only_some(processes):
    computed = [0] * processes

    def work(rank: int) -> list[Tensor]:
        def counted(stack: Tensor) -> Tensor:
            computed[rank] += len(stack)
            return swirl(stack)

        return transform_shared(matrices(), counted)

    found = on_threads(processes, work)
    assert sum(computed) == len(SHAPES)
    assert max(computed) < len(SHAPES) or processes == 1
    for number, expected in enumerate(EXPECTED):
        for own in found:
            assert torch.equal(own[number], expected)


def test_muon_on_three_processes_is_muon_on_one():
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}

    def train(split: Callable[[Tensor], Tensor]) -> list[Tensor]:
        weights = [torch.nn.Parameter(split(matrix)) for matrix in matrices()]
        optimizer = StackedMuon(weights, **options)
        for step in range(3):
            for number, weight in enumerate(weights[:-1] if step == 1 else weights):
                weight.grad = split(torch.cos(matrices()[number] * (step + 1)))
            optimizer.step()
            optimizer.zero_grad()
        return [weight.detach() for weight in weights]

    expected = train(Tensor.clone)
    for own in on_threads(3, lambda rank: train(Tensor.clone)):
        for number, weight in enumerate(own):
            # Products of one matrix and of a batch of them may round bfloat16 in another order.
            torch.testing.assert_close(weight, expected[number], rtol=0, atol=2e-3)
