"""`gpt serve` on the folder of a `gpt fit` that is still running, as two terminals do it."""

import os
import socket
import time
from contextlib import suppress

import pytest
from processes import forked
from tiny_runs import TEXT, TINY

from tests.serve.server import httpx

pytestmark = [
    pytest.mark.allow_hosts(["127.0.0.1"]),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks both programs"),
]
ENDLESS = ["--run", "live", "--trainer.max_steps", "1000000", "--trainer.val_check_interval", "1000000"]


def wait_for(found, seconds=60):
    """The first true `found()`."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def test_new_snapshots_are_served_while_the_run_trains(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = ["serve", "--checkpoint", "runs/live", "--port", str(port)]
    with forked([*TINY, *ENDLESS], folder=tmp_path) as fit:
        wait_for(lambda: list(tmp_path.glob("runs/live/snapshots/*.safetensors")) or not fit.is_alive())
        with (
            forked(serve, folder=tmp_path) as server,
            httpx.Client(base_url=f"http://127.0.0.1:{port}") as client,
        ):

            def curves():
                with suppress(httpx.ConnectError):  # not listening yet
                    return client.get("/training").json()
                return {} if server.is_alive() else pytest.fail("gpt serve ended")

            before = wait_for(curves)
            steps = len(before["snapshots"])
            after = wait_for(lambda: new if len((new := curves())["snapshots"]) >= steps + 2 else None)
            form = {"prompt": "The", "max_tokens": 4, "snapshot": after["snapshots"][-1]}
            assert client.post("/v1/completions", json=form).status_code == 200
            assert fit.is_alive()
    assert after["snapshots"][:1] == [1] and after["train"][-1][0] > before["train"][-1][0]
