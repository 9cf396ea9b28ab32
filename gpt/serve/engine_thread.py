"""The engine in its own thread, and its interface to asyncio."""

import asyncio
import logging
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from gpt.errors import InputError
from gpt.generation import Engine, Request, Sample, Token, for_decoding
from gpt.model import GPT
from gpt.serve.errors import server_failed
from gpt.serve.limits import Limits
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
        self.samples: list[Sample] = []  # those of the requests, once the engine has them
        self.running = self.unread = sum(one.samples for one in requests if one.max_new_tokens or one.echo)
        self._tokens: asyncio.Queue[tuple[int, Token] | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def next(self) -> tuple[int, Token]:
        """The next token, with the index of its sample among those of all requests; raises a `put` error."""
        token = await self._tokens.get()
        if isinstance(token, Exception):
            raise token
        self.unread -= token[1].finished is not None
        return token

    def put(self, token: tuple[int, Token] | Exception) -> None:
        """Add a token or an error, from the engine's thread."""
        with suppress(RuntimeError):  # the event loop is closed: no one waits
            self._loop.call_soon_threadsafe(self._tokens.put_nowait, token)


class EngineThread:
    """Runs an engine while there is work; use as a context manager.

    At most `limits.running` samples are decoded together, and at most `limits.running + limits.waiting`
    handles and calls are open. Between two steps of the engine at most one call runs. A step of more than
    `limits.seconds` is a problem.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, limits: Limits) -> None:
        self.model, self.limits = for_decoding(model), limits
        self._new_engine = partial(Engine, self.model, tokenizer, max_samples=limits.running, chunk=_CHUNK)
        self._engine = self._new_engine()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._open: set[Handle] = set()
        self._owners: dict[Sample, Handle] = {}
        self._stopping = False
        self._busy_since = math.inf  # when the present step began; infinity between two steps

    def __enter__(self) -> "EngineThread":
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._thread.join(timeout=self.limits.seconds)

    def stop(self) -> None:
        """End the thread after its present step; what is open gets no answer, and nothing more is taken."""
        self._stopping = True
        self._orders.put(lambda: None)  # wakes the thread

    @property
    def running(self) -> int:
        """Samples that are decoded now."""
        return self._engine.running

    @property
    def open(self) -> int:
        """Handles and calls that are not finished."""
        return len(self._open) + len(self._calls)

    @property
    def problem(self) -> str | None:
        """Why nothing is decoded; None if all is well."""
        if not self._thread.is_alive():
            return "the decoding thread has ended"
        if time.monotonic() - self._busy_since > self.limits.seconds:
            return f"a decoding step has taken more than {self.limits.seconds} s"
        return None

    async def watch(self, exit_when_stalled: bool) -> None:
        """End the process when a step has taken twice `limits.seconds`: the step cannot be ended alone."""
        while not exit_when_stalled or time.monotonic() - self._busy_since <= 2 * self.limits.seconds:
            await asyncio.sleep(_WATCH)
        print(f"gpt serve: {self.problem}: the server ends, start it again", file=sys.stderr, flush=True)
        os._exit(1)

    def submit(self, requests: Sequence[Request]) -> Handle:
        """Start requests; HTTPException 503 where too many are open."""
        self._check_queue()
        handle = Handle(requests)
        if handle.running:
            self._open.add(handle)
            self._orders.put(lambda: self._add(handle))
        return handle

    def cancel(self, handle: Handle) -> None:
        """Stop the work on a handle; nothing happens if it is finished."""
        self._orders.put(lambda: self._cancel(handle))

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function of the model in the engine's thread, unless it is cancelled; errors as `submit`."""
        self._check_queue()
        future: Future[Result] = Future()
        self._calls.append((function, future))
        self._orders.put(lambda: None)  # wakes the thread
        return await asyncio.wrap_future(future)

    def _check_queue(self) -> None:
        if self.open >= self.limits.running + self.limits.waiting or self._stopping:
            raise HTTPException(503, "too many requests are waiting, try again later")

    def _run(self) -> None:
        while not (self._stopping and self._orders.empty()):
            try:
                self._turn()
            except BaseException as error:  # SystemExit too: nothing else serves
                self._fail(error)

    def _turn(self) -> None:
        """Take all orders, then run a step and a call."""
        self._busy_since = math.inf
        idle = not (self._engine.busy or self._calls)
        while idle or not self._orders.empty():
            self._orders.get()()
            idle = False
        self._busy_since = time.monotonic()
        if self._engine.busy:
            self._step()
        while self._calls:
            function, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
                break

    def _step(self) -> None:
        for token in self._engine.step():
            handle = self._owners[token.sample]
            if token.finished:
                del self._owners[token.sample]
                handle.running -= 1
                if not handle.running:
                    self._open.discard(handle)
            handle.put((handle.samples.index(token.sample), token))
        for sample, error in self._engine.failed.items():
            _log.error("a sample failed: %r", error, exc_info=error)
            if sample in self._owners:  # not if another sample of its handle failed too
                self._end(self._owners[sample], server_failed())

    def _add(self, handle: Handle) -> None:
        try:
            for request in handle.requests:
                added = self._engine.add(request)
                handle.samples += added
                self._owners |= dict.fromkeys(added, handle)
        except Exception as error:
            if not isinstance(error, InputError):
                _log.error("a request failed: %r", error, exc_info=error)
            self._end(handle, error if isinstance(error, InputError) else server_failed())

    def _end(self, handle: Handle, error: Exception) -> None:
        handle.put(error)
        self._cancel(handle)

    def _cancel(self, handle: Handle) -> None:
        for sample in handle.samples:
            self._engine.cancel(sample)
            self._owners.pop(sample, None)
        self._open.discard(handle)

    def _fail(self, error: BaseException) -> None:
        """Report the error to every handle, and serve the next ones with a new engine."""
        _log.error("decoding failed: %r", error, exc_info=error)
        self._engine = self._new_engine()
        for handle in list(self._open):  # a copy: the event loop adds to the set
            self._end(handle, server_failed())
