"""Let a run's processes agree on measurements before they train together."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import count

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

_WAITING = timedelta(minutes=10)
_FAILED = "failed"
_CALLS = count()  # all processes make the same calls in the same order


def process_count() -> int:
    """Return the number of processes that torchrun has started together, or 1."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "MASTER_ADDR" in os.environ else 1


def of_first_process(name: str, measure: Callable[[], float]) -> float:
    """Return a number that the first process measures and sends to all others that torchrun has started.

    The processes connect through torchrun's address. If the first one fails, the others raise RuntimeError. A
    single process measures for itself.
    """
    if process_count() == 1:
        return measure()
    store = _store()
    key = f"gpt/{next(_CALLS)}/{name}"
    if os.environ["RANK"] == "0":
        try:
            value = measure()
        except BaseException:
            store.set(key, _FAILED)
            raise
        store.set(key, repr(value))
        return value
    answer = store.get(key).decode()
    if answer == _FAILED:
        raise RuntimeError(f"the first process could not measure its {name}")
    return float(answer)


@cache  # kept open, because the first process serves the others until it ends
def _store() -> Store:
    store, _, _ = next(rendezvous("env://", timeout=_WAITING))
    return store
