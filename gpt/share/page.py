"""Build the page from the files in this folder: for a server, or with a model in it."""

import hashlib
import json
import re
from base64 import b64encode
from pathlib import Path

from gpt.plain import JsonObject

# The scripts that compute in a browser.
_ENGINE = ("kernel.js", "tokenizer.js", "healing.js", "model.js", "sampling.js", "worker.js")


def served_page() -> tuple[str, str]:
    """Return the page that asks a server, and its Content-Security-Policy for a header of the answer.

    No other site may show the page in a frame, as it could hide the frame and misuse a visitor's clicks. Only
    a header can forbid that, because browsers ignore `frame-ancestors` in the page itself.
    """
    page, policy = _page({"page": _texts("page.js", "http.js")}, "", "'self'")
    return page, f"{policy}; frame-ancestors 'none'"


def page_of(description: JsonObject, blocks: list[str]) -> str:
    """Return the page that computes by itself, with a model in the form of `gpt.share.file`."""
    # `<` is escaped, so that a browser never reads `</script>` in the data.
    plain = json.dumps(description, ensure_ascii=False).replace("<", "\\u003c")
    scripts = {"engine": f"const FILE = {plain};\n{_texts(*_ENGINE)}", "page": _texts("page.js", "file.js")}
    numbered = enumerate(blocks)
    data = (f'<script type="text/plain" id="block{number}">{block}</script>\n' for number, block in numbered)
    page, policy = _page(scripts, "".join(data), "'none'")
    return page.replace(
        "<!-- policy -->", f'<meta http-equiv="Content-Security-Policy" content="{policy}">', 1
    )


def _page(scripts: dict[str, str], data: str, connect: str) -> tuple[str, str]:
    """Return the page with these scripts by id and the data after them, and the policy that allows these."""
    page = _texts("page.html")
    style = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    elements = "\n".join(f'<script id="{name}">{text}</script>' for name, text in scripts.items())
    policy = (
        f"default-src 'none'; script-src {_hashes(*scripts.values())} 'wasm-unsafe-eval'; worker-src blob:; "
        f"style-src {_hashes(*style)}; img-src data:; connect-src {connect}; base-uri 'none'; "
        "form-action 'none'"
    )
    return page.replace("<!-- scripts -->", f"{elements}\n{data}"), policy


def _texts(*names: str) -> str:
    return "\n".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in names)


def _hashes(*texts: str) -> str:
    digests = (b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
