"""Import large packages without searching them for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing(alone: bool) -> Iterator[None]:
    """Around imports, in a process that does nothing `alone` but one command.

    Python's collector searches none of what is imported for garbage: not during the imports, and not later.
    Torch and Lightning are 400,000 objects that stay until the process ends. Searching them took a fifth of
    the time of a run of one step, most of it at exit. In another program this would also keep that program's
    garbage, so nothing is done there.
    """
    if not alone:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
