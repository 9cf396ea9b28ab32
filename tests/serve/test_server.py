"""The time limits of a connection, with an application of a few lines and a client that is a socket."""

import socket
import time
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from gpt.errors import InputError
from gpt.serve.limits import Limits
from tests.serve.server import listening

uvicorn = pytest.importorskip("uvicorn")
from gpt.serve.server import new_server  # noqa: E402 - needs the extra

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])
LIMITS = Limits(read_seconds=1, write_seconds=1)
REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
LONG = 8 << 20
"""Bytes of a reply that the buffers of the system cannot take."""


class App:
    """Replies with these chunks."""

    def __init__(self, chunks):
        self.chunks = chunks

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        length = sum(map(len, self.chunks))
        headers = [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i, chunk in enumerate(self.chunks, start=1):
            await send({"type": "http.response.body", "body": chunk, "more_body": i < len(self.chunks)})


def connect(address):
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(("127.0.0.1", int(address.rpartition(":")[2])))
    return client


def read_to_end(client, size=1 << 16, pause=0.0):
    """The number of bytes up to the end of the connection."""
    received = 0
    with suppress(ConnectionResetError):
        while part := client.recv(size):
            received += len(part)
            time.sleep(pause)
    return received


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [("127.0.0.1", None, "in use"), ("127.0.0.1", 99999, "0-65535"), ("no.such.host.invalid", 80, "")],
)
def test_an_address_that_cannot_be_listened_on(host, port, reason, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = port or taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"cannot listen on {host}, port {port}: .*{reason}"):
            new_server(App([b""]), LIMITS, host=host, port=port).run()
    assert capfd.readouterr().err == ""


def slow_client():
    """A connection with more to write than its client takes, and the function that waits until its next look:
    whether it is kept when so many bytes wait there.
    """
    config = new_server(App([b""]), LIMITS).config
    looks = []
    loop = SimpleNamespace(call_later=lambda seconds, look, *state: looks.append((look, state)) or Mock())
    transport = Mock(**{"get_write_buffer_size.return_value": 0, "get_extra_info.return_value": None})
    connection = config.http(config, uvicorn.server.ServerState(), {}, loop)
    connection.connection_made(transport)
    connection.cycle = SimpleNamespace(response_complete=False)

    def next_look(unsent):
        transport.get_write_buffer_size.return_value = unsent
        if looks:
            look, state = looks.pop()
            look(*state)
        return not transport.abort.called

    connection.pause_writing()
    return connection, next_look


KB = 1 << 10


@pytest.mark.parametrize(
    ("unsent", "kept"),
    [
        ([100 * KB, 84 * KB, 68 * KB, 52 * KB, 36 * KB], True),  # 16 KB within each limit
        ([100 * KB, 99 * KB, 98 * KB], False),
        ([100 * KB, 90 * KB, 80 * KB, 70 * KB, 66 * KB], False),  # at the latest in the second of two limits
    ],
)
def test_who_takes_16_kb_within_each_limit_is_kept(unsent, kept):
    _, next_look = slow_client()
    assert all(map(next_look, unsent)) == kept


@pytest.mark.parametrize("resumed", [True, False])
def test_who_takes_all_and_is_written_as_much_again_is_kept(resumed):
    """The amount that waits is then the same at each look."""
    connection, next_look = slow_client()
    for _ in range(4):
        kept = next_look(100 * KB)
        if resumed:
            connection.resume_writing()
            connection.pause_writing()
    assert kept == resumed


@pytest.mark.parametrize("before", [b"", REQUEST], ids=["new", "kept alive"])
@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nX-"], ids=["silence", "headers"])
def test_headers_that_do_not_end_lose_the_connection(before, start):
    with listening(App([b"ok"]), LIMITS) as address, connect(address) as client:
        if before:
            client.sendall(before)
            while not client.recv(1 << 16).endswith(b"ok"):
                pass
        started = time.monotonic()
        client.settimeout(0.2)
        closed = False
        while not closed and time.monotonic() - started < 10:
            try:
                client.sendall(start and (start if time.monotonic() - started < 0.1 else b"a"))
                closed = not client.recv(1 << 16)
            except ConnectionError:
                closed = True
            except TimeoutError:
                continue
        assert closed and 0.5 < time.monotonic() - started < 5


def test_a_request_that_is_slow_within_the_limits_is_answered():
    with listening(App([b"ok"]), LIMITS) as address, connect(address) as client:
        for _ in range(3):
            for i in range(0, len(REQUEST), 10):
                client.sendall(REQUEST[i : i + 10])
                time.sleep(0.1)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("chunks", [[bytes(LONG)], [bytes(1 << 16)] * 128], ids=["one piece", "streamed"])
@pytest.mark.parametrize("close", [False, True], ids=["kept alive", "closed after it"])
def test_a_client_that_does_not_read_loses_the_connection(chunks, close):
    request = REQUEST.replace(b"Host", b"Connection: close\r\nHost") if close else REQUEST
    with listening(App(chunks), LIMITS) as address, connect(address) as client:
        client.sendall(request)
        time.sleep(2.5)
        assert read_to_end(client) < LONG


@pytest.mark.parametrize("chunks", [[bytes(LONG)], [bytes(1 << 16)] * 128], ids=["one piece", "streamed"])
def test_a_client_that_reads_slowly_gets_the_whole_reply(chunks):
    with listening(App(chunks), LIMITS) as address, connect(address) as client:
        client.sendall(REQUEST.replace(b"Host", b"Connection: close\r\nHost"))
        started = time.monotonic()
        assert read_to_end(client, pause=0.002) > LONG
        assert time.monotonic() - started > LIMITS.write_seconds
