"""A run's training, for the page: the losses of its snapshots, and an engine for each snapshot in use."""

import asyncio
import logging
import math
from collections.abc import Callable
from pathlib import Path

from starlette.exceptions import HTTPException

from gpt.errors import InputError
from gpt.plain import JsonObject
from gpt.serve.engine_thread import ENDED, EngineThread
from gpt.weights.runs import snapshots_of


class History:
    """The engine of the served model, `own`, and those of the snapshots of its run.

    At most `most` snapshots are in memory. The least recently used one makes room for a new one. Snapshots
    are loaded one after another. A request may be cancelled while it waits. A load that it began goes on, as
    a thread cannot be stopped, and the next one waits for it.
    """

    def __init__(self, own: EngineThread, run: Path, load: Callable[[Path], EngineThread], most: int) -> None:
        self.own = own
        self.run = run
        self.load = load
        self.most = most
        self.engines: dict[Path, EngineThread] = {}
        self._one_at_a_time = asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None
        self._ended = False

    def end(self) -> None:
        """End all engines. A snapshot that is being loaded ends when it is there."""
        self._ended = True
        for engine in (self.own, *self.engines.values()):
            engine.end()

    def curve(self) -> JsonObject:
        """Return the steps of the snapshots, and (step, loss) pairs where the loss is finite.

        The loss is in nats per token, of the training batch at this step.
        """
        snapshots = snapshots_of(self.run)
        train = [(step, loss) for step, loss, _ in snapshots if math.isfinite(loss)]
        return {"snapshots": [step for step, _, _ in snapshots], "train": train}

    async def engine(self, step: int | None) -> EngineThread:
        """Return the engine of the snapshot at a step, or of the served model for None.

        Raises HTTPException 404 if there is no such snapshot, 500 if it cannot be loaded, and 503 if all
        engines are busy or have ended.
        """
        if step is None:
            return self.own
        async with self._one_at_a_time:
            if self._loading:
                await asyncio.wait([self._loading])  # the request that began it may have been cancelled
            if self._ended:
                raise ENDED
            file = next((file for saved_step, _, file in snapshots_of(self.run) if saved_step == step), None)
            if file is None:
                raise HTTPException(404, f"there is no snapshot of step {step}")
            if file not in self.engines:
                self._make_room()
                self._loading = asyncio.create_task(self._load(file))
                await asyncio.wait([self._loading])
            if self._ended:
                raise ENDED
            if file not in self.engines:
                raise HTTPException(500, f"the snapshot of step {step} cannot be loaded; the log says why")
            self.engines[file] = self.engines.pop(file)  # the order is that of use, the latest last
            return self.engines[file]

    async def _load(self, file: Path) -> None:
        """Add the engine of a snapshot. If it cannot be loaded, there is none, and the log has the cause."""
        try:
            engine = await asyncio.to_thread(self.load, file)
        except Exception as error:
            is_foreseen = isinstance(error, InputError | OSError)
            log = logging.getLogger(__name__)
            log.error("%s cannot be loaded: %s", file, error, exc_info=None if is_foreseen else error)
            return
        if self._ended:
            engine.end()
        else:
            self.engines[file] = engine

    def _make_room(self) -> None:
        """End the least recently used engine that is idle, if there are `most` engines."""
        if len(self.engines) >= self.most:
            idle = next((file for file, engine in self.engines.items() if not engine.open), None)
            if idle is None:
                raise HTTPException(503, "too many snapshots are in use, try again later")
            self.engines.pop(idle).end()
