"""Run the engine in its own thread, and connect it to asyncio."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from starlette.exceptions import HTTPException

from gpt.generation import Engine, Request, Sample, Token
from gpt.model import GPT
from gpt.serve.errors import server_failed
from gpt.text.tokenizer import Tokenizer

Result = TypeVar("Result")
Piece = tuple[int, Token]  # the index of a sample in its handle, and a token

_SAMPLES = 16  # how many samples are decoded together
_CHUNK = 256  # how many tokens of prompts are read between two steps of the other samples
ENDED = HTTPException(503, "the model is shutting down, try again later")


class Handle:
    """A client's requests in the engine. `unread` counts the samples whose last token was not read yet."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.samples: list[Sample] = []
        self.unread = sum(request.samples for request in requests)
        self._steps: asyncio.Queue[list[Piece] | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def next(self) -> list[Piece]:
        """Wait for the tokens of the next step, with the indices of their samples.

        Raises an exception that was `put` instead of tokens.
        """
        pieces = await self._steps.get()
        if isinstance(pieces, Exception):
            raise pieces
        self.unread -= sum(token.finished is not None for _, token in pieces)
        return pieces

    def put(self, pieces: list[Piece] | Exception) -> None:
        """Add tokens, or an exception that ends the wait for them. Any thread may call this."""
        with suppress(RuntimeError):  # the event loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._steps.put_nowait, pieces)


class EngineThread:
    """An engine in a thread, which runs while there is work, until `end`.

    At most one `call` runs between two steps of the engine.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        self.model = model
        self.open: set[Handle | Callable[[], object]] = set()  # unfinished handles and calls
        self._new_engine = partial(Engine, model, tokenizer, max_samples=_SAMPLES, chunk=_CHUNK)
        self._engine = self._new_engine()
        self._thread = ThreadPoolExecutor(1, "decoding")
        self._owners: dict[Sample, tuple[Handle, int]] = {}  # the handle of each sample, and the index in it
        self._one_call = asyncio.Lock()
        self._ended = False
        self._step_is_queued = False

    def end(self) -> None:
        """Take no more requests and stop after the current step. Clients that wait get status 503."""
        self._ended = True
        self._tell(ENDED)
        self._thread.shutdown(wait=False)

    def submit(self, requests: Sequence[Request]) -> Handle:
        """Start requests. They run until their handle is cancelled. Raises HTTPException 503 after `end`."""
        if self._ended:
            raise ENDED
        handle = Handle(requests)
        self.open.add(handle)
        self._queue(self._add, handle)
        return handle

    def cancel(self, handle: Handle) -> None:
        """Stop the work on a handle and drop it."""
        self.open.discard(handle)
        self._queue(self._cancel, handle)

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function that uses the model in the engine's thread, and return its result.

        Raises HTTPException 503 if `end` comes before it begins.
        """
        self.open.add(function)
        try:
            async with self._one_call:
                if self._ended:
                    raise ENDED
                return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        finally:
            self.open.discard(function)

    def _tell(self, error: Exception) -> None:
        for handle in list(self.open):
            if isinstance(handle, Handle):
                handle.put(error)

    def _queue(self, function: Callable[..., None], *arguments: object) -> None:
        """Put a function into the thread's queue. After it a step is put there, if there is work.

        A step does not run at once but gets its own place in the queue, behind all that came while the step
        before it ran: new requests, cancelled ones, and a call. So these wait for one step at most.
        """

        def run() -> None:
            try:
                function(*arguments)
            except Exception as error:  # the next requests get a new engine
                self._engine = self._new_engine()
                self._owners = {}
                self._tell(server_failed(error))
            if self._engine.busy and not self._step_is_queued:
                self._step_is_queued = True
                self._queue(self._step)

        with suppress(RuntimeError):  # the thread has ended
            self._thread.submit(run)

    def _add(self, handle: Handle) -> None:
        for request in handle.requests:
            handle.samples += self._engine.add(request)
        self._owners |= {sample: (handle, index) for index, sample in enumerate(handle.samples)}

    def _step(self) -> None:
        self._step_is_queued = False
        pieces = defaultdict[Handle, list[Piece]](list)
        for token in self._engine.step():
            handle, index = self._owners[token.sample]
            pieces[handle].append((index, token))
        for handle, some in pieces.items():
            handle.put(some)
        for sample, error in self._engine.failed.items():
            self._owners[sample][0].put(server_failed(error))

    def _cancel(self, handle: Handle) -> None:
        for sample in handle.samples:
            if self._owners.pop(sample, None):
                self._engine.cancel(sample)
