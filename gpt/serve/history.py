"""A run's training for the page: the losses of its snapshots, and engines that write with them."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from gpt.errors import InputError
from gpt.serve.engine_thread import EngineThread
from gpt.weights.checkpoint import snapshots_of


class History:
    """The model that is served, `own`, and the snapshots of its run.

    At most `most` snapshots are in memory, the one used last the longest. They are read one after another.
    """

    def __init__(self, own: EngineThread, run: Path, load: Callable[[Path], EngineThread], most: int) -> None:
        self.own = own
        self.run = run
        self.load = load
        self.most = most
        self.engines: dict[Path, EngineThread] = {}
        self._one_at_a_time = asyncio.Lock()

    def end(self) -> None:
        """End all engines."""
        for engine in (self.own, *self.engines.values()):
            engine.end()

    def curve(self) -> dict[str, Any]:
        """The steps of the snapshots, and (step, nats per token of its batch) where the loss is finite."""
        found = snapshots_of(self.run)
        train = [(step, loss) for step, loss, _ in found if math.isfinite(loss)]
        return {"snapshots": [step for step, _, _ in found], "train": train}

    async def engine(self, step: int | None) -> EngineThread:
        """The engine of a step's snapshot, or the model's own for None.

        HTTPException 404 where there is none, 500 where its file is damaged, 503 where all engines are busy.
        """
        if step is None:
            return self.own
        async with self._one_at_a_time:
            file = next((file for one, _, file in snapshots_of(self.run) if one == step), None)
            if file is None:
                raise HTTPException(404, f"there is no snapshot of step {step}")
            if file not in self.engines:
                self._make_room()
                try:
                    self.engines[file] = await asyncio.to_thread(self.load, file)
                except (InputError, OSError):
                    raise HTTPException(500, f"the snapshot of step {step} cannot be read") from None
            self.engines[file] = self.engines.pop(file)  # the last one used is the last one
            return self.engines[file]

    def _make_room(self) -> None:
        """End the engine that was used the longest time ago, if there are `most`."""
        if len(self.engines) >= self.most:
            idle = next((file for file, engine in self.engines.items() if not engine.open), None)
            if idle is None:
                raise HTTPException(503, "too many snapshots are in use, try again later")
            self.engines.pop(idle).end()
