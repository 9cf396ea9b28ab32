"""Runs the blocks of README.md and docs/ that install, each in a fresh clone and a new environment.

    python scripts/check_install.py

Every block runs as it is printed, `make train` with its whole training. Then the environment that it made
trains for four steps, generates, and serves if the extra is there. Where PyTorch's own package index does not
answer, pip does not wait for it and uv does not ask it. Needs git, make, uv and a package index. Exit status
1 if a block fails.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from install import cpu_index_answers

ROOT = Path(__file__).parents[1]
INSTALLS = re.compile("pip install|scripts/install.py|^make train", re.M)
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)
USE = """
test ! -d minimal-gpt || cd minimal-gpt
. .venv/bin/activate
gpt fit --run mine --trainer.max_steps 4 --trainer.val_check_interval 4
gpt generate --checkpoint runs/mine --prompt 'Once' --max_new_tokens 8
python -c 'import fastapi' 2> /dev/null || exit 0
port=$(python -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
gpt serve --checkpoint runs/mine --port "$port" &
trap "kill $!" EXIT
curl --silent --show-error --fail --retry 60 --retry-delay 1 --retry-connrefused \\
    "http://127.0.0.1:$port/health"
"""


def blocks(root: Path = ROOT) -> list[str]:
    """The blocks that install, in the order of the pages."""
    pages = [root / "README.md", *sorted(root.glob("docs/*.md"))]
    found = [block for page in pages for block in BLOCK.findall(page.read_text(encoding="utf-8"))]
    return [block for block in found if INSTALLS.search(block)]


def prepared(block: str, cpu_index: bool) -> str:
    """The block for this machine: the clone is of this checkout, whose tests run elsewhere."""
    block = block.replace("git clone REPOSITORY", f"git clone --quiet '{ROOT}'")
    block = re.sub("^make test", "make --dry-run test", block, flags=re.M)
    if not cpu_index:
        block = block.replace("--torch-backend auto ", "")  # uv fails without the index
    return block


def main() -> int:
    """Run the blocks and print what each took."""
    cpu_index, failed = cpu_index_answers(), 0
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "GPT_CACHE": str(Path(temporary, "cache"))}
        if not cpu_index:
            environment["PIP_RETRIES"] = "0"
        for number, block in enumerate(blocks(), start=1):
            folder = Path(temporary, str(number))
            subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
            script = f"{prepared(block, cpu_index)}\n{USE}"
            status = subprocess.run(
                ["sh", "-ec", script], cwd=folder, env=environment, check=False
            ).returncode
            print(f"--- block {number}: status {status}", flush=True)
            failed += status != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
