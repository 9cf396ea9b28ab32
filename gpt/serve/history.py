"""A run's training for the page: the curves of its loss, and engines that write with its snapshots."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from gpt.errors import InputError
from gpt.pictures.runs import Metrics
from gpt.serve.engine_thread import EngineThread
from gpt.weights.checkpoint import snapshots_of

_BUSY = "too many snapshots are in use, try again later"


class History:
    """The snapshots of the run of the model that is served, `own`.

    At most `most` are in memory, the one used last the longest, and as many wait to be read. One is read at a
    time, once for all who wait for it, and to its end also when they leave.
    """

    def __init__(self, own: EngineThread, run: Path, load: Callable[[Path], EngineThread], most: int) -> None:
        self.own, self.run, self.load, self.most = own, run, load, most
        self.engines: dict[Path, EngineThread] = {}
        self._reading: dict[Path, asyncio.Task[EngineThread]] = {}
        self._one_at_a_time = asyncio.Lock()

    def curves(self) -> dict[str, Any]:
        """The steps of the snapshots, and (step, loss) pairs in nats per token of training and validation."""
        found = snapshots_of(self.run)
        try:
            metrics = Metrics.read(self.run / "metrics.csv")
            train, validation = (_thinned(metrics, y) for y in ("train_loss", "val_loss"))
        except InputError:  # there is none yet, or it is damaged
            train, validation = [], []
        # A row is the mean of an interval: coarse at first, where the snapshots have the loss of a step.
        train = [pair for pair in train if pair[0] >= 4 * train[0][0]]
        first = train[0][0] if train else math.inf
        early = [(step, loss) for step, loss, _ in found if step < first and math.isfinite(loss)]
        return {"snapshots": [one[0] for one in found], "train": early + train, "validation": validation}

    async def engine(self, step: int | None) -> EngineThread:
        """The engine of a step's snapshot, or the model's own for None.

        HTTPException 404 where there is none, 500 where its file is damaged, 503 where all engines are busy.
        """
        if step is None:
            return self.own
        files = {one[0]: one[2] for one in await asyncio.to_thread(snapshots_of, self.run)}
        if step not in files:
            raise HTTPException(404, f"there is no snapshot of step {step}")
        file = files[step]
        if file not in self._reading:
            if len(self._reading) >= self.most:
                raise HTTPException(503, _BUSY)
            self._reading[file] = reading = asyncio.create_task(self._engine(file))
            reading.add_done_callback(_seen)
        return await asyncio.shield(self._reading[file])

    async def _engine(self, file: Path) -> EngineThread:
        try:
            async with self._one_at_a_time:
                engine = self.engines.pop(file, None)
                if engine is None or engine.problem:
                    self._make_room()
                    engine = await asyncio.to_thread(self.load, file)
                self.engines[file] = engine
                return engine
        except (InputError, OSError):
            raise HTTPException(500, f"the snapshot {file.stem} cannot be read") from None
        finally:
            del self._reading[file]

    def _make_room(self) -> None:
        """Stop the engine that was used the longest time ago, if there are `most`."""
        if len(self.engines) >= self.most:
            idle = next((file for file, engine in self.engines.items() if not engine.open), None)
            if idle is None:
                raise HTTPException(503, _BUSY)
            self.engines.pop(idle).stop()


def _seen(reading: asyncio.Task[EngineThread]) -> None:
    """Nobody may be waiting any more for an error, which asyncio would then log."""
    if not reading.cancelled():
        reading.exception()


def _thinned(metrics: Metrics, y: str) -> list[tuple[float, float]]:
    """At most 128 points of each doubling of their number, as the page draws them."""
    pairs = enumerate(zip(*metrics.points("step", y), strict=True))
    return [pair for i, pair in pairs if i % (1 << max(0, i.bit_length() - 7)) == 0]
