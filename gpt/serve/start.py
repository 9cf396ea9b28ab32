"""The command `gpt serve`: it starts the HTTP server."""

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

from gpt.errors import InputError, missing_extra
from gpt.evaluation.copied import Copied, training_text
from gpt.files import readable
from gpt.generation.build import build_first
from gpt.generation.decoding import for_decoding, suits_program
from gpt.progress import notice
from gpt.weights.checkpoint import parts_of
from gpt.weights.load import Device, find, load_with_template
from gpt.weights.rounding import WeightPrecision
from gpt.weights.runs import model_name, run_of


def serve(
    checkpoint: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    precision: WeightPrecision | None = None,
    device: Device = "auto",
    api_key: str | None = None,
    max_seconds: int = 300,
    drain_seconds: int = 30,
    show_copied: bool = False,
) -> None:
    """Serve a model over HTTP: completions and chats in OpenAI's form, and a page at /.

    Args:
        checkpoint: a run, a checkpoint, an exported or imported folder, gpt2 or OWNER/NAME on the hub; by
            default the newest run.
        host: the address to listen on; 0.0.0.0 lets other machines in.
        port: the port to listen on.
        name: what clients call the model; the checkpoint's name if left out.
        precision: the precision of the weights, by default the model's own. On a CPU bfloat16 is faster,
            int8 more so, and int4 most, which costs a little of the text's quality.
        device: where the model runs; auto takes a GPU if there is one.
        api_key: the key that clients must send; $GPT_API_KEY if left out. Without a key everyone may ask.
        max_seconds: the most time for a request.
        drain_seconds: how long requests may run after SIGTERM or Ctrl-C; then their clients get an error.
        show_copied: mark passages on the page that are copied verbatim from the run's training text.
    """
    try:
        from gpt.serve.app import create_app
        from gpt.serve.limits import LOCAL, RequestLimits, check_key, local_only
        from gpt.serve.server import Server
    except ImportError:
        raise missing_extra("gpt serve", "serve") from None
    limits = RequestLimits(max_seconds=max_seconds, drain_seconds=drain_seconds)
    api_key = api_key or os.environ.get("GPT_API_KEY") or None
    check_key(api_key)  # before the weights are read
    path = find(checkpoint)
    loaded, tokenizer, template = load_with_template(path, device)
    model = for_decoding(loaded, precision)
    if suits_program(model):
        build_first()  # a server that has always something to decode would not take it later
    run = run_of(path.resolve())
    name = readable(name) if name else model_name(checkpoint, path)
    copied = Copied(training_text(run, tokenizer), tokenizer) if show_copied else None
    listener = _listener(host, port)
    port = listener.getsockname()[1]  # the system chooses one for 0
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    app = create_app(
        model,
        tokenizer,
        name=name,
        limits=limits,
        api_key=api_key,
        template=template,
        run=run,
        copied=copied,
        precision=precision,
        trained=parts_of(path)[1] if run else None,
    )
    if host in LOCAL:
        app.add_middleware(local_only)
    elif api_key is None:
        notice(f"warning: anyone who can reach {address} can use this server; require a key with --api_key")
    print(f"page at http://{address}/, API at http://{address}/v1; Ctrl-C stops the server", flush=True)
    # After it has shut down, uvicorn raises the KeyboardInterrupt again.
    with suppress(KeyboardInterrupt):
        Server(app, limits).run([listener])


def _listener(host: str, port: int) -> socket.socket:
    try:
        if not 0 <= port < 1 << 16:
            raise OSError("a port is a number of 0 to 65535")
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "it is in use by another program, give another --port" if in_use else error
        raise InputError(f"cannot listen on {host}, port {port}: {reason}") from None
