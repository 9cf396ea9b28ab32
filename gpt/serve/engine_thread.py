"""The engine in its own thread, and its interface to asyncio."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from gpt.generation import Piece, Request, Sample, TextEngine, TextStream, for_decoding
from gpt.model import GPT
from gpt.serve.errors import Busy, EngineFailed
from gpt.tokenizer import Tokenizer

Result = TypeVar("Result")


class Handle:
    """A client's requests in the engine: `next` waits for the next piece of any of their samples.

    `running` counts the samples that the engine has not finished, `unread` those whose end was not read.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.running = self.unread = sum(one.samples for one in requests if one.max_new_tokens)
        self._pieces: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def next(self) -> tuple[int, Piece]:
        """The next piece, with the index of its sample among those of all requests.

        Raises:
            EngineFailed: the samples are lost.
        """
        piece = await self._pieces.get()
        if isinstance(piece, Exception):
            raise piece
        self.unread -= piece[1].finished is not None
        return piece

    def put(self, piece: tuple[int, Piece] | Exception) -> None:
        """Add a piece, from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the event loop is closed: no one waits for the piece
            return


class EngineThread:
    """Runs an engine while there is work; use as a context manager.

    Args:
        model: any GPT; best one from `for_decoding`.
        tokenizer: the model's.
        max_samples: how many samples are decoded together.
        max_waiting: how many more handles may be open.
        chunk: tokens of a prompt that are read between two steps of the other samples.
    """

    def __init__(
        self, model: GPT, tokenizer: Tokenizer, *, max_samples: int, max_waiting: int, chunk: int = 256
    ) -> None:
        self.model, self.tokenizer, self.max_open = for_decoding(model), tokenizer, max_samples + max_waiting
        self._new_engine = partial(TextEngine, self.model, tokenizer, max_samples=max_samples, chunk=chunk)
        self._engine = self._new_engine()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: set[Handle] = set()
        self._owners: dict[Sample, tuple[Handle, int]] = {}
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def __enter__(self) -> "EngineThread":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._orders.put(None)
        self._thread.join()

    @property
    def running(self) -> int:
        """Samples that are decoded now."""
        return self._engine.running

    @property
    def open(self) -> int:
        """Handles that are not finished."""
        return len(self._open)

    def submit(self, requests: Sequence[Request], stop: Sequence[str] = ()) -> Handle:
        """Start requests.

        Raises:
            Busy: too many handles are open.
            InputError: a stop string is empty.
        """
        TextStream(self.tokenizer, stop)  # raises here rather than in the engine's thread
        if self.open >= self.max_open:
            raise Busy
        handle = Handle(requests)
        if handle.running:
            self._open.add(handle)
            self._orders.put(lambda: self._add(handle, stop))
        return handle

    def cancel(self, handle: Handle) -> None:
        """Stop the work on a handle; nothing happens if it is finished."""
        self._orders.put(lambda: self._cancel(handle))

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run a function of the model in the engine's thread, between two steps."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._orders.put(run)
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(block=not self._engine.busy)
            except queue.Empty:
                self._step()
                continue
            if order is None:
                return
            order()

    def _step(self) -> None:
        try:
            pieces = self._engine.step()
        except Exception as error:
            self._fail(error)
            return
        for piece in pieces:
            handle, index = self._owners[piece.token.sample]
            if piece.finished:
                del self._owners[piece.token.sample]
                handle.running -= 1
                if not handle.running:
                    self._open.discard(handle)
            handle.put((index, piece))

    def _add(self, handle: Handle, stop: Sequence[str]) -> None:
        samples = [sample for request in handle.requests for sample in self._engine.add(request, stop)]
        self._owners.update({sample: (handle, index) for index, sample in enumerate(samples)})

    def _cancel(self, handle: Handle) -> None:
        for sample in [sample for sample, (owner, _) in self._owners.items() if owner is handle]:
            self._engine.cancel(sample)
            del self._owners[sample]
        self._open.discard(handle)

    def _fail(self, error: Exception) -> None:
        """Report the error to every handle, and serve the next ones with a new engine."""
        for handle in self._open:
            handle.put(EngineFailed(repr(error)))
        self._open.clear()
        self._owners.clear()
        self._engine = self._new_engine()
