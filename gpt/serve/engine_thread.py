"""The engine in its own thread, and its interface to asyncio."""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from gpt.errors import InputError
from gpt.generation import Engine, Request, Sample, Token
from gpt.model import GPT
from gpt.serve.errors import server_failed
from gpt.serve.limits import Limits
from gpt.text.tokenizer import Tokenizer

Result = TypeVar("Result")
Piece = tuple[int, Token]  # a token, and the index of its sample among those of a handle

CALL_COST = 1 << 14  # of a function of the model, in the units of `cost`
_CHUNK = 256  # tokens of a prompt that are read between two steps of the other samples
_ENDED = "the model is shutting down, try again later"


def cost(requests: Sequence[Request]) -> int:
    """What requests take of memory and time, in units of about 200 bytes.

    A token of the answer is one; log-probabilities add one for its own and one for each alternative. A token
    of a prompt is one, and what every sample needs besides is 64.
    """
    total = 0
    for one in requests:
        tokens = one.max_new_tokens + (len(one.tokens) if one.echo else 0)
        entries = 1 if one.alternatives is None else 2 + one.alternatives
        total += len(one.tokens) + one.samples * (64 + tokens * entries)
    return total


class Handle:
    """A client's requests in the engine; `unread` counts the samples whose end was not read."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.unread = sum(one.samples for one in requests)
        self._steps: asyncio.Queue[list[Piece] | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def next(self) -> list[Piece]:
        """Wait for the tokens of the next step, with the indices of their samples; raises what was `put`."""
        pieces = await self._steps.get()
        if isinstance(pieces, Exception):
            raise pieces
        self.unread -= sum(token.finished is not None for _, token in pieces)
        return pieces

    def put(self, pieces: list[Piece] | Exception) -> None:
        """Add tokens or an error, from any thread."""
        with suppress(RuntimeError):  # the event loop is closed: no one waits
            self._loop.call_soon_threadsafe(self._steps.put_nowait, pieces)


class EngineThread:
    """Runs an engine in a thread while there is work, until `stop`.

    Between two steps of the engine at most one call runs. A step of more than `limits.seconds` is a problem.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, limits: Limits) -> None:
        self.model, self.limits = model, limits
        self._new_engine = partial(Engine, self.model, tokenizer, max_samples=limits.running, chunk=_CHUNK)
        self._engine = self._new_engine()
        self._thread = ThreadPoolExecutor(1, "decoding")
        self._costs: dict[Handle | Callable[[], Any], int] = {}  # of what is open
        self._owners: dict[Sample, tuple[Handle, int]] = {}  # with the sample's index
        self._one_call = asyncio.Lock()
        self._ended = self._step_ordered = False
        self._busy_since = math.inf  # when the present task of the thread began; infinity between two

    def end(self) -> None:
        """Take nothing more; those who wait for a token get HTTPException 503."""
        self._ended = True
        for one in list(self._costs):
            if isinstance(one, Handle):
                one.put(HTTPException(503, _ENDED))

    def stop(self) -> None:
        """`end`, also the thread after its present step."""
        self.end()
        self._thread.shutdown(wait=self.problem is None)

    @property
    def running(self) -> int:
        """Samples that are decoded now."""
        return self._engine.running

    @property
    def open(self) -> int:
        """How many handles and calls are not finished."""
        return len(self._costs)

    @property
    def cost(self) -> int:
        """That of all that is open."""
        return sum(list(self._costs.values()))

    @property
    def problem(self) -> str | None:
        """Why nothing is decoded; None if all is well."""
        stalled = time.monotonic() - self._busy_since > self.limits.seconds
        return f"a decoding step has taken more than {self.limits.seconds} s" if stalled else None

    def submit(self, requests: Sequence[Request]) -> Handle:
        """Start requests; HTTPException 503 after `end`."""
        if self._ended:
            raise HTTPException(503, _ENDED)
        handle = Handle(requests)
        self._costs[handle] = cost(requests)
        self._order(self._add, handle)
        return handle

    def cancel(self, handle: Handle) -> None:
        """Stop the work on a handle; nothing happens if it is finished."""
        self._order(self._cancel, handle)

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function of the model in the engine's thread, unless it is cancelled."""
        self._costs[function] = CALL_COST
        try:
            async with self._one_call:
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, function)
        finally:
            del self._costs[function]

    def _order(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function in the thread after what was ordered before, then a step if there is work."""

        def run() -> None:
            try:
                self._timed(function, *arguments)
            except Exception as error:  # the next requests get a new engine
                self._engine = self._new_engine()
                for handle in {handle for handle, _ in self._owners.values()}:
                    self._end(handle, server_failed(error))
            if self._engine.busy and not self._step_ordered:
                self._step_ordered = True
                self._order(self._step)

        with suppress(RuntimeError):  # stopped
            self._thread.submit(run)

    def _timed(self, function: Callable[..., Result], *arguments: Any) -> Result:
        self._busy_since = time.monotonic()
        try:
            return function(*arguments)
        finally:
            self._busy_since = math.inf

    def _add(self, handle: Handle) -> None:
        index = itertools.count()
        try:
            for request in handle.requests:
                for sample in self._engine.add(request):
                    self._owners[sample] = handle, next(index)
        except Exception as error:
            self._end(handle, error if isinstance(error, InputError) else server_failed(error))

    def _step(self) -> None:
        self._step_ordered = False
        pieces: dict[Handle, list[Piece]] = {}
        for token in self._engine.step():
            handle, index = self._owners[token.sample]
            pieces.setdefault(handle, []).append((index, token))
            if token.finished:
                del self._owners[token.sample]
        for handle, some in pieces.items():
            if not self._samples(handle):
                self._cancel(handle)
            handle.put(some)
        for sample, error in self._engine.failed.items():
            if sample in self._owners:  # not if another sample of its handle failed too
                self._end(self._owners[sample][0], server_failed(error))

    def _samples(self, handle: Handle) -> list[Sample]:
        """Those that have not ended."""
        return [sample for sample, (owner, _) in self._owners.items() if owner is handle]

    def _end(self, handle: Handle, error: Exception) -> None:
        handle.put(error)
        self._cancel(handle)

    def _cancel(self, handle: Handle) -> None:
        for sample in self._samples(handle):
            self._engine.cancel(sample)
            del self._owners[sample]
        self._costs.pop(handle, None)
