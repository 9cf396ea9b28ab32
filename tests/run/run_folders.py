"""What is in a folder, and runs as a kill leaves them."""

import shutil
from pathlib import Path


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed(whole: Path, step: int) -> Path:
    """The run `whole` as `runs/cut`, where a kill has left the checkpoint of `step` and later rows."""
    run = Path("runs/cut")
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("checkpoints", "summary.json"))
    (run / "checkpoints").mkdir()
    saved = whole / "checkpoints" / f"step-{step}.safetensors"
    shutil.copy(saved, run / "checkpoints" / "last.safetensors")
    return run
