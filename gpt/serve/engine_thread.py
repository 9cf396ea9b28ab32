"""The engine in a thread of its own, and its interface to asyncio."""

import asyncio
import itertools
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from starlette.exceptions import HTTPException

from gpt.errors import InputError
from gpt.generation import Engine, Request, Sample, Token, for_decoding
from gpt.model import GPT
from gpt.serve.errors import server_failed
from gpt.tokenizer import Tokenizer

Result = TypeVar("Result")

_CHUNK = 256  # tokens of a prompt that are read between two steps of the other samples
_WATCH = 1.0  # seconds between two looks at the thread
_log = logging.getLogger(__name__)


class Handle:
    """A client's requests in the engine: `next` waits for the next token of any of their samples.

    `running` counts the samples that the engine has not finished, `unread` those whose end was not read.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.running = self.unread = sum(one.samples for one in requests if one.max_new_tokens or one.echo)
        self.tokens: asyncio.Queue[tuple[int, Token] | Exception] = asyncio.Queue()

    async def next(self) -> tuple[int, Token]:
        """The next token, with the index of its sample among those of all requests; raises a queued error."""
        token = await self.tokens.get()
        if isinstance(token, Exception):
            raise token
        self.unread -= token[1].finished is not None
        return token


class EngineThread:
    """Runs an engine while there is work; use as an asynchronous context manager.

    At most `max_samples` are decoded together, and at most `max_samples + max_waiting` handles and calls are
    open. Between two steps of the engine at most one call runs. A step of more than `stalled_after` seconds
    is a problem. The thread alone uses the engine; the event loop leaves it orders and hands out the tokens.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        max_samples: int,
        max_waiting: int,
        stalled_after: float = 300,
    ) -> None:
        self.model, self.max_open = for_decoding(model), max_samples + max_waiting
        self.stalled_after = stalled_after
        self._new_engine = partial(Engine, self.model, tokenizer, max_samples=max_samples, chunk=_CHUNK)
        self._engine = self._new_engine()
        self._orders: deque[Callable[[], None]] = deque()
        self._found: deque[tuple[Handle, tuple[int, Token] | Exception]] = deque()
        self._open: set[Handle] = set()
        self._owners: dict[Sample, tuple[Handle, int]] = {}
        self._calls = 0
        self._decoding: asyncio.Task[None] | None = None
        self._busy_since = math.inf  # when the thread began what it does now; infinity while it waits

    async def __aenter__(self) -> "EngineThread":
        self._thread, self._one_call = ThreadPoolExecutor(1, "decoding"), asyncio.Lock()
        return self

    async def __aexit__(self, *exception: object) -> None:
        for handle in list(self._open):
            self.cancel(handle)
        if self._decoding:
            await asyncio.wait([self._decoding], timeout=self.stalled_after)
        self._thread.shutdown(wait=False)

    @property
    def running(self) -> int:
        """Samples that are decoded now."""
        return self._engine.running

    @property
    def open(self) -> int:
        """Handles and calls that are not finished."""
        return len(self._open) + self._calls

    @property
    def problem(self) -> str | None:
        """Why nothing is decoded; None if all is well."""
        stalled = time.monotonic() - self._busy_since > self.stalled_after
        return f"a decoding step has taken more than {self.stalled_after} s" if stalled else None

    async def watch(self, exit_when_stalled: bool) -> None:
        """End the process when a step has taken twice `stalled_after`: the step cannot be ended alone."""
        while not exit_when_stalled or time.monotonic() - self._busy_since <= 2 * self.stalled_after:
            await asyncio.sleep(_WATCH)
        print(f"gpt serve: {self.problem}: the server ends, start it again", file=sys.stderr, flush=True)
        os._exit(1)

    def submit(self, requests: Sequence[Request]) -> Handle:
        """Start requests; HTTPException 503 where too many are open."""
        self._check_queue()
        handle = Handle(requests)
        if handle.running:
            self._open.add(handle)
            self._orders.append(lambda: self._add(handle))
            if self._decoding is None or self._decoding.done():
                self._decoding = asyncio.create_task(self._decode())
        return handle

    def cancel(self, handle: Handle) -> None:
        """Stop the work on a handle; nothing happens if it is finished."""
        if handle in self._open:
            self._orders.append(lambda: self._cancel(handle))

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function of the model in the engine's thread, unless it is cancelled; errors as `submit`."""
        self._check_queue()
        self._calls += 1
        try:
            async with self._one_call:  # the thread takes turns between it and the steps
                return await self._in_thread(function)
        finally:
            self._calls -= 1

    def _check_queue(self) -> None:
        if self.open >= self.max_open:
            raise HTTPException(503, "too many requests are waiting, try again later")

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        def timed() -> Result:
            self._busy_since = time.monotonic()
            try:
                return function()
            finally:
                self._busy_since = math.inf

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)

    async def _decode(self) -> None:
        """Run steps until there is no more work, and hand out their tokens while the next one runs."""
        while self._orders or self._engine.busy:
            await self._in_thread(self._step)
            while self._found:
                handle, token = self._found.popleft()
                handle.tokens.put_nowait(token)

    def _step(self) -> None:
        """Carry out all orders, then run a step."""
        try:
            while self._orders:
                self._orders.popleft()()
            for token in self._engine.step():
                handle, index = self._owners[token.sample]
                if token.finished:
                    del self._owners[token.sample]
                    handle.running -= 1
                    if not handle.running:
                        self._open.discard(handle)
                self._found.append((handle, (index, token)))
            for sample, error in self._engine.failed.items():
                _log.error("a sample failed: %r", error, exc_info=error)
                if sample in self._owners:  # not if another sample of its handle failed too
                    self._end(self._owners[sample][0], server_failed())
        except BaseException as error:
            _log.error("decoding failed: %r", error, exc_info=error)
            self._owners.clear()
            for handle in list(self._open):  # a copy: the event loop adds to the set
                self._end(handle, server_failed())
            self._engine = self._new_engine()

    def _add(self, handle: Handle) -> None:
        index = itertools.count()
        try:
            for request in handle.requests:
                self._owners |= {sample: (handle, next(index)) for sample in self._engine.add(request)}
        except Exception as error:
            if not isinstance(error, InputError):
                _log.error("a request failed: %r", error, exc_info=error)
            self._end(handle, error if isinstance(error, InputError) else server_failed())

    def _end(self, handle: Handle, error: Exception) -> None:
        self._found.append((handle, error))
        self._cancel(handle)

    def _cancel(self, handle: Handle) -> None:
        for sample in [sample for sample, (owner, _) in self._owners.items() if owner is handle]:
            self._engine.cancel(sample)
            del self._owners[sample]
        self._open.discard(handle)
