"""The engine in its own thread, and its interface to asyncio."""

import asyncio
import math
import os
import sys
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
from gpt.threads import spread_threads

Result = TypeVar("Result")

_CHUNK = 256  # tokens of a prompt that are read between two steps of the other samples
_WATCH = 1.0  # seconds between two looks at the thread


class Handle:
    """A client's requests in the engine; `unread` counts the samples whose end was not read."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.samples: list[Sample] = []  # those of the requests, once the engine has them
        self.unread = sum(one.samples for one in requests if one.max_new_tokens or one.echo)
        self._tokens: asyncio.Queue[tuple[int, Token] | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def next(self) -> tuple[int, Token]:
        """Wait for the next token, with the index of its sample; raises an error that was `put`."""
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
    """Runs an engine in a thread while there is work, until `stop`.

    At most `limits.running + limits.waiting` handles and calls are open. Between two steps of the engine at
    most one call runs. A step of more than `limits.seconds` is a problem.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, limits: Limits) -> None:
        self.model, self.limits = model, limits
        self._new_engine = partial(Engine, self.model, tokenizer, max_samples=limits.running, chunk=_CHUNK)
        self._engine = self._new_engine()
        self._thread = ThreadPoolExecutor(1, "decoding", initializer=spread_threads)
        self._open: set[Handle | Callable[[], Any]] = set()
        self._owners: dict[Sample, Handle] = {}
        self._one_call = asyncio.Lock()
        self._stopped = self._step_ordered = False
        self._busy_since = math.inf  # when the present task of the thread began; infinity between two

    def stop(self) -> None:
        """End the thread after its present step; what is open gets no answer, and nothing more is taken."""
        self._stopped = True
        self._thread.shutdown(wait=self.problem is None)

    @property
    def running(self) -> int:
        """Samples that are decoded now."""
        return self._engine.running

    @property
    def open(self) -> int:
        """Handles and calls that are not finished."""
        return len(self._open)

    @property
    def problem(self) -> str | None:
        """Why nothing is decoded; None if all is well."""
        stalled = time.monotonic() - self._busy_since > self.limits.seconds
        return f"a decoding step has taken more than {self.limits.seconds} s" if stalled else None

    def end_when_stalled(self) -> None:
        """Wait until a step has taken twice `limits.seconds`, then end the process: nothing else ends it."""
        while time.monotonic() - self._busy_since <= 2 * self.limits.seconds:
            time.sleep(_WATCH)
        print(f"gpt serve: {self.problem}: the server ends, start it again", file=sys.stderr, flush=True)
        os._exit(1)

    def submit(self, requests: Sequence[Request]) -> Handle:
        """Start requests; HTTPException 503 where too many are open."""
        self._check_queue()
        handle = Handle(requests)
        if handle.unread:
            self._open.add(handle)
            self._order(self._add, handle)
        return handle

    def cancel(self, handle: Handle) -> None:
        """Stop the work on a handle; nothing happens if it is finished."""
        self._order(self._cancel, handle)

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function of the model in the engine's thread, unless it is cancelled; errors as `submit`."""
        self._check_queue()
        self._open.add(function)
        try:
            async with self._one_call:
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._timed, function)
        finally:
            self._open.discard(function)

    def _check_queue(self) -> None:
        if self.open >= self.limits.running + self.limits.waiting or self._stopped:
            raise HTTPException(503, "too many requests are waiting, try again later")

    def _order(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function in the thread after what was ordered before, then a step if there is work."""

        def run() -> None:
            try:
                self._timed(function, *arguments)
            except Exception as error:  # the next requests get a new engine
                self._engine = self._new_engine()
                for handle in set(self._owners.values()):
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
        except Exception:
            raise
        except BaseException as error:  # SystemExit too, which would end the thread or the event loop
            raise RuntimeError(repr(error)) from error
        finally:
            self._busy_since = math.inf

    def _add(self, handle: Handle) -> None:
        try:
            for request in handle.requests:
                added = self._engine.add(request)
                handle.samples += added
                self._owners |= dict.fromkeys(added, handle)
        except SystemExit as error:  # the engine does not know the handle yet
            self._end(handle, server_failed(RuntimeError(repr(error))))
        except Exception as error:
            self._end(handle, error if isinstance(error, InputError) else server_failed(error))

    def _step(self) -> None:
        self._step_ordered = False
        for token in self._engine.step():
            handle = self._owners[token.sample]
            if token.finished:
                del self._owners[token.sample]
                if handle not in self._owners.values():
                    self._open.discard(handle)
            handle.put((handle.samples.index(token.sample), token))
        for sample, error in self._engine.failed.items():
            if sample in self._owners:  # not if another sample of its handle failed too
                self._end(self._owners[sample], server_failed(error))

    def _end(self, handle: Handle, error: Exception) -> None:
        handle.put(error)
        self._cancel(handle)

    def _cancel(self, handle: Handle) -> None:
        for sample in handle.samples:
            self._engine.cancel(sample)
            self._owners.pop(sample, None)
        self._open.discard(handle)
