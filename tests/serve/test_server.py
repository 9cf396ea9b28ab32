"""How a server starts and ends, what it does behind nginx, and who is let in."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpt.errors import InputError
from gpt.serve import start
from gpt.serve.limits import RequestLimits
from gpt.serve.start import serve
from gpt.weights.checkpoint import RunPart
from tests.serve.server import MODEL, TOKENIZER, connected, httpx, listening, new_app, slow
from tests.snapshots import add_checkpoint

pytestmark = pytest.mark.allow_hosts(["127.0.0.1"])
ROOT = Path(__file__).parents[2]
LONG = {"prompt": "Hi", "max_tokens": 2000, "temperature": 0}


@pytest.fixture
def exported(tmp_path) -> Path:
    """A model to serve."""
    MODEL.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("127.0.0.1", None, "in use by another program"),
        ("127.0.0.1", 99999, "0 to 65535"),
        ("no.such.host.invalid", 80, ""),
    ],
)
def test_an_address_that_cannot_be_listened_on(host, port, reason, exported, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = port or taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"cannot listen on {host}, port {port}: .*{reason}"):
            serve(exported, host=host, port=port)
    assert capfd.readouterr().err == ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Client(threading.Thread):
    """Sends a request from a thread, and notes what it gets."""

    def __init__(self, address, **form):
        super().__init__()
        self.address, self.form = address, {**LONG, **form}
        self.started = threading.Event()
        self.start()

    def run(self):
        with (
            httpx.Client(base_url=self.address, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=self.form) as response,
        ):
            self.status, self.text = response.status_code, ""
            for text in response.iter_text():
                self.started.set()
                self.text += text


def test_a_server_that_ends_lets_requests_end_and_cuts_long_ones():
    limits = RequestLimits(drain_seconds=2)
    with listening(new_app(slow(0.02), limits=limits), limits) as address:
        whole = Client(address)
        short = Client(address, max_tokens=25, stream=True)
        assert short.started.wait(10)
    short.join(20)
    whole.join(20)
    assert whole.status == 503 and "shutting down" in json.loads(whole.text)["error"]["message"]
    assert short.text.endswith("data: [DONE]\n\n") and '"length"' in short.text and "error" not in short.text


def test_sigterm_tells_those_that_it_cuts(exported):
    port = free_port()
    command = ["serve", "--checkpoint", str(exported), "--port", str(port), "--drain_seconds", "1"]
    server = subprocess.Popen([sys.executable, "-m", "gpt.cli", *command], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert b"page at" in server.stdout.readline()
        stream = Client(f"http://127.0.0.1:{port}", n=100, stream=True)
        assert stream.started.wait(20)
        server.send_signal(signal.SIGTERM)
        stream.join(20)
        *_, error, done, _ = stream.text.split("\n\n")
        told = json.loads(error.removeprefix("data: "))["error"]["message"]
        assert "shutting down" in told and done == "data: [DONE]"
        assert server.wait(20) == -signal.SIGTERM
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize("suits", [True, False])
def test_the_program_is_compiled_before_the_server_listens(suits, exported, started, monkeypatch):
    """Under load from its start, a server never asks for the program again."""
    happened = []
    listener = start._listener
    monkeypatch.setattr(start, "suits_program", lambda model: suits)
    monkeypatch.setattr(start, "build_first", lambda: happened.append("compiled"))
    monkeypatch.setattr(start, "_listener", lambda *address: happened.append("listens") or listener(*address))
    started(exported)
    assert happened == (["compiled"] if suits else []) + ["listens"]


def test_the_key_of_the_environment_and_the_hosts_of_a_local_server(exported, started, monkeypatch):
    monkeypatch.setenv("GPT_API_KEY", "secret")
    app, *_ = started(exported)
    with connected(app) as client:

        def status(host: str, **key: str) -> int:
            return client.get("/v1/models", headers={"host": host, **key}).status_code

        key = {"authorization": "Bearer secret"}
        assert status("localhost") == 401
        for host in ("localhost", "127.0.0.1:8000", "[::1]:8000"):
            assert status(host, **key) == 200
        for host in ("page.of.another.site", "localhost.page.of.another.site", "[::1", "", "127.0.0.1@x"):
            assert status(host, **key) == 400
        answer = client.get("/v1/models", headers={"host": "other", **key})
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "localhost" in answer.json()["error"]["message"]


def test_the_line_at_the_start_has_the_port_that_the_system_chose(exported, started, capsys):
    *_, (_, port, *_) = started(exported)
    assert port and f"page at http://127.0.0.1:{port}/, API" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["max_seconds", "drain_seconds"])
def test_a_limit_out_of_range_is_named_as_the_option(option, exported):
    with pytest.raises(InputError, match=f"^{option} must be at least 1, got 0$"):
        serve(exported, **{option: 0})


@pytest.mark.parametrize("key", ["schlüssel", "a b", "a\n", os.fsdecode(b"\xff")], ids=ascii)
def test_a_key_that_clients_could_not_send_is_refused_before_the_weights_are_read(key, tmp_path):
    with pytest.raises(InputError, match=r"^the API key must consist of ASCII .*, without spaces$"):
        serve(tmp_path / "no such run", api_key=key)
    with pytest.raises(InputError, match="the API key must"):
        new_app(api_key=key)


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("0.0.0.0", None, True), ("0.0.0.0", "secret", False), ("127.0.0.1", None, False)],
)
def test_the_command_warns_of_an_open_server(exported, started, capsys, host, key, warned):
    _, config, address = started(exported, host=host, api_key=key)
    assert address[0] == host and config.limit_concurrency == 256
    assert (f"anyone who can reach 0.0.0.0:{address[1]} " in capsys.readouterr().err) == warned


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_the_page_learns_the_figures_of_a_run_whose_name_is_not_utf8(tmp_path, started):
    state = RunPart(options={"data": {"corpus": "my.txt"}}, seconds=60.0)
    app, *_ = started(add_checkpoint(tmp_path / os.fsdecode(b"caf\xe9"), MODEL, TOKENIZER, state))
    with connected(app, "http://localhost") as client:
        about = client.get("/about").json()
        assert client.get("/v1/models/caf\\udce9").json()["id"] == about["id"] == "caf\\udce9"
    assert about["figures"]["text"] == "my.txt" and about["figures"]["minutes"] == 1


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HALF = HEAD + b"content-length: 9\r\n\r\n{"


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"", b""), (HEAD, b""), (HALF, b"HTTP/1.1 408")],
    ids=["nothing", "head", "half a body"],
)
def test_a_request_that_does_not_arrive_is_ended(sent, answer):
    limits = RequestLimits(arrival_seconds=1, last_seconds=1)
    with listening(new_app(limits=limits), limits) as address, connect(address) as client:
        client.sendall(sent)
        read = b"".join(iter(lambda: client.recv(4096), b""))
    assert read[:12] == answer


@pytest.mark.parametrize("sent", [b"", HALF], ids=["nothing", "half a body"])
def test_requests_that_do_not_arrive_shut_nobody_out(sent):
    with listening(new_app()) as address, httpx.Client(timeout=20) as other, ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(address)).sendall(sent)
            other.get(f"{address}/health")  # then the server has seen it
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": "Hi"}, timeout=20)
    assert answer.status_code == 200


@pytest.fixture
def proxied(tmp_path):
    """The address of a slow server behind nginx, by the example of docs/serving.md."""
    (config,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs/serving.md").read_text("utf-8"), re.DOTALL)
    port = free_port()
    with listening(new_app(slow(0.02), api_key="secret")) as address:
        for was, is_ in (
            ("http://127.0.0.1:8000", address),
            ("listen 443 ssl;", f"listen 127.0.0.1:{port};"),
            ("client_header_timeout 30s", "client_header_timeout 1s"),
        ):
            assert was in config
            config = config.replace(was, is_)
        config = re.sub(r" *ssl_certificate.*\n", "", config)
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
            config = f"{name}_temp_path {tmp_path};\n{config}"
        config = f"daemon off; pid {tmp_path}/pid; events {{}} http {{ access_log off;\n{config} }}"
        (tmp_path / "nginx.conf").write_text(config, encoding="utf-8")
        proxy = subprocess.Popen(["nginx", "-e", "stderr", "-c", tmp_path / "nginx.conf"])
        yield f"http://127.0.0.1:{port}"
        proxy.terminate()
        proxy.wait(20)


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_the_example_for_nginx(proxied):
    """What the server leaves to a proxy: slow headers. What the proxy must leave to the server: streams."""
    transport = httpx.HTTPTransport(retries=6)  # until nginx listens
    key = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=proxied, timeout=20, transport=transport) as client:
        assert client.get("/v1/models").status_code == 401
        form = {"prompt": "Hi", "max_tokens": 20, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=form, headers=key) as response:
            assert len(list(response.iter_raw())) > 10  # the proxy does not collect the twenty events
    with connect(proxied) as slow_client:
        slow_client.sendall(b"GET / HTTP/1.1\r\nX-")
        assert b" 200 " not in slow_client.recv(1 << 16)  # closed, or 408
