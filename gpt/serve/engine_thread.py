"""The engine in a thread of its own, and what an asyncio program asks of it."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from gpt.generation import Engine, Request, Sample, TextStream, Token
from gpt.generation.packed import for_decoding
from gpt.model import GPT
from gpt.tokenizer import Tokenizer

Result = TypeVar("Result")


class Busy(Exception):
    """So many requests wait that no other is taken in."""


class Broken(Exception):
    """The engine failed; what it was at is lost, and it started anew."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a step gave to one sample of a ticket."""

    index: int
    """Which of the ticket's samples."""
    text: str
    """The text that can be shown now, often none."""
    token: Token
    finished: str | None
    """`stop` or `length` with the last piece."""


class Ticket:
    """A request that was taken in. Its pieces come with `next`, until all samples are finished.

    `running` counts those the engine works on, in its thread, `left` those whose end the reader has not seen.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, stop: Sequence[str]) -> None:
        self.request = request
        self.texts = [TextStream(tokenizer, stop) for _ in range(request.samples)]
        self.running = self.left = request.samples if request.max_new_tokens else 0
        self.samples: list[Sample] = []
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def next(self) -> Piece:
        """The next piece.

        Raises:
            Broken: the engine failed.
        """
        piece = await self._pieces.get()
        if isinstance(piece, Exception):
            raise piece
        return piece

    def put(self, piece: Piece | Exception) -> None:
        """Hand over a piece, from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the event loop is closed: nobody is left to hear of it
            return


class Batcher:
    """Runs an engine as long as there is work; use as a context manager.

    Args:
        model: any GPT; best one from `for_decoding`.
        tokenizer: the model's.
        max_samples: the most samples that are decoded together.
        max_waiting: the most tickets that are open beyond that.
        chunk: tokens of a prompt that are read between two steps of the others.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        max_samples: int = 16,
        max_waiting: int = 64,
        chunk: int = 256,
    ) -> None:
        self.model, self.tokenizer = for_decoding(model), tokenizer
        self.max_samples, self.max_open, self.chunk = max_samples, max_samples + max_waiting, chunk
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: set[Ticket] = set()
        self._of: dict[Sample, tuple[Ticket, int]] = {}
        self._engine = self._new_engine()
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def __enter__(self) -> "Batcher":
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
        """Tickets that are not finished."""
        return len(self._open)

    def submit(self, request: Request, stop: Sequence[str] = ()) -> Ticket:
        """Take in a request.

        Raises:
            Busy: too many are open.
            InputError: a stop string is empty.
        """
        if len(self._open) >= self.max_open:
            raise Busy
        ticket = Ticket(self.tokenizer, request, stop)
        if not ticket.running:
            return ticket
        self._open.add(ticket)
        self._orders.put(lambda: self._add(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop work on a ticket; nothing happens if it is finished."""
        self._orders.put(lambda: self._cancel(ticket))

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
            tokens = self._engine.step()
        except Exception as error:  # every ticket hears of it, and the next ones find a sound engine
            self._fail(error)
            return
        for token in tokens:
            if token.sample in self._of:  # not if a stop string ended it in this very step
                self._hand_over(token)

    def _hand_over(self, token: Token) -> None:
        ticket, index = self._of[token.sample]
        text = ticket.texts[index]
        piece, finished = text.feed(token.id), token.sample.finished
        if text.stopped:
            self._engine.cancel(token.sample)
            finished = "stop"
        if finished:
            piece += text.close()
            del self._of[token.sample]
            ticket.running -= 1
            if ticket.running == 0:
                self._open.discard(ticket)
        ticket.put(Piece(index=index, text=piece, token=token, finished=finished))

    def _add(self, ticket: Ticket) -> None:
        ticket.samples = self._engine.add(ticket.request)
        self._of.update({sample: (ticket, index) for index, sample in enumerate(ticket.samples)})

    def _cancel(self, ticket: Ticket) -> None:
        for sample in ticket.samples:
            self._engine.cancel(sample)
            self._of.pop(sample, None)
        self._open.discard(ticket)

    def _fail(self, error: Exception) -> None:
        broken = Broken(repr(error))
        for ticket in self._open:
            ticket.put(broken)
        self._open.clear()
        self._of.clear()
        self._engine = self._new_engine()

    def _new_engine(self) -> Engine:
        vocab_size = min(self.tokenizer.n_vocab, self.model.config.vocab_size)
        return Engine(self.model, max_samples=self.max_samples, chunk=self.chunk, vocab_size=vocab_size)
