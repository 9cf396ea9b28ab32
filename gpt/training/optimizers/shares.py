"""Muon's matrices shared out over the processes: each orthogonalises some, and they exchange the updates."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Transform = Callable[[Tensor], Tensor]  # matrices of one shape (N, R, C) to as many of this shape


def divide(shapes: Sequence[tuple[int, ...]], processes: int) -> list[list[int]]:
    """The numbers of each process's matrices, so that all have about the same work.

    The costliest comes first and goes to the process with the least so far (Graham 1969, "Bounds on
    multiprocessing timing anomalies"). The cost of R x C: products of r x c, c x r and r x r with r <= c.
    """
    costs = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
    shares: list[list[int]] = [[] for _ in range(processes)]
    work = [0] * processes
    for number in sorted(range(len(shapes)), key=lambda number: -costs[number]):
        least = work.index(min(work))
        shares[least].append(number)
        work[least] += costs[number]
    return [sorted(share) for share in shares]


def transform_shared(matrices: list[Tensor], transform: Transform) -> list[Tensor]:
    """`transform(matrices)`, of which each process computes its share; call it on all processes."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        return _gather(matrices, transform)
    return _transform(matrices, transform)


def by_shape(matrices: list[Tensor]) -> list[list[int]]:
    """The numbers of the matrices of each shape."""
    shapes = [matrix.shape for matrix in matrices]
    return [[n for n, shape in enumerate(shapes) if shape == one] for one in dict.fromkeys(shapes)]


def _transform(matrices: list[Tensor], transform: Transform) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for same in by_shape(matrices):
        stack = torch.stack([matrices[number] for number in same])
        found.update(zip(same, transform(stack), strict=True))
    return [found[number] for number in range(len(matrices))]


def _gather(matrices: list[Tensor], transform: Transform) -> list[Tensor]:
    shares = divide([matrix.shape for matrix in matrices], dist.get_world_size())
    own = _transform([matrices[number] for number in shares[dist.get_rank()]], transform)
    sizes = [[matrices[number].numel() for number in share] for share in shares]
    longest = max(map(sum, sizes))  # a collective takes as much from each process
    flat = _flat(own, matrices[0])
    flat = torch.nn.functional.pad(flat, (0, longest - len(flat)))
    gathered = list(flat.new_empty(len(shares), longest))
    dist.all_gather(gathered, flat)
    found: dict[int, Tensor] = {}
    for row, share, size in zip(gathered, shares, sizes, strict=True):
        found.update(zip(share, torch.split(row[: sum(size)], size), strict=True))
    return [found[number].view_as(matrix) for number, matrix in enumerate(matrices)]


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like.new_empty(0), *(tensor.flatten() for tensor in tensors)])
