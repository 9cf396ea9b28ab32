"""nanochat: its tokenizer trainer, model, optimizer and schedule, of width 128.

It has two chances: four layers with a vocabulary of 2,048 tokens, and the two layers and 8,192 tokens of our
recipe. The better one counts.

Needs what nanochat imports in this environment, `rustbpe` and `wandb` among others.
"""

import os
import re
import time
from pathlib import Path

import pyarrow as pa
from benchmarks.common import run_python
from pyarrow import parquet

SIZES = ((4, 2048), (2, 8192))  # layers and tokens of the vocabulary
WIDTH = 128
PARAGRAPH_END = r"(?<=\n\n)"  # each paragraph is a document of its own, in training and in scoring
TOKENIZER = "-m scripts.tok_train --vocab-size="
# An update has 2,048 tokens, ours has 1,536; nanochat's learning rates follow from them.
TRAIN = (
    "-m scripts.base_train --device-type=cpu --head-dim=32 --window-pattern=L --max-seq-len=128 "
    "--device-batch-size=16 --total-batch-size=2048 --eval-every=-1 --core-metric-every=-1 --sample-every=-1"
)
# Windows of 128 tokens, each scored once after its first token, as nanoGPT's are. As in training, a token
# that stands for no text begins each paragraph; to predict that one costs nothing.
SCORE = """
import re, sys, torch
from nanochat.checkpoint_manager import load_model
model, tokenizer, _ = load_model("base", torch.device("cpu"), phase="eval")
text = open(sys.argv[1], encoding="utf-8").read()
begin = tokenizer.get_bos_token_id()
paragraphs = [part for part in re.split(sys.argv[2], text) if part]
ids = torch.tensor([id_ for part in paragraphs for id_ in (begin, *tokenizer.encode(part))])
nats, size = 0.0, 128
with torch.no_grad():
    for start in range(0, len(ids) - 1, size):
        x, y = ids[start : start + size][: len(ids) - 1 - start], ids[start + 1 : start + 1 + size]
        y = torch.where(y == begin, -1, y)
        nats += model(x[None], y[None], loss_reduction="sum").item()
print(nats / len(text.encode()) / torch.log(torch.tensor(2.0)).item())
"""


def train_nanochat(
    checkout: Path, learned: Path, held_out: Path, folder: Path, budget: float
) -> tuple[float, float]:
    """Bits per byte on `held_out` and seconds of the better run on `learned`; each takes at most `budget`."""
    return min(
        _train(checkout, learned, held_out, folder / f"nanochat-{size[0]}", budget, *size) for size in SIZES
    )


def _train(
    checkout: Path, learned: Path, held_out: Path, base: Path, budget: float, layers: int, vocabulary: int
) -> tuple[float, float]:
    """Bits per byte and seconds of a run of these sizes.

    Its vocabulary is learned within the time. Short runs before fill the compiler's cache and tell the speed.
    """
    shards = base / "base_data_climbmix"
    shards.mkdir(parents=True)
    documents = [part for part in re.split(PARAGRAPH_END, learned.read_text(encoding="utf-8")) if part]
    # The last shard is its validation part, which is not looked at.
    for number, texts in enumerate((documents, documents[-100:])):
        parquet.write_table(
            pa.table({"text": texts}), shards / f"shard_{number:05d}.parquet", row_group_size=1024
        )
    environment = {
        "NANOCHAT_BASE_DIR": str(base),
        "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")]),
        "TORCHINDUCTOR_CACHE_DIR": str(base.parent / "inductor"),
    }

    def timed(arguments: list[str]) -> float:
        began = time.perf_counter()
        run_python(arguments, checkout, environment)
        return time.perf_counter() - began

    def train(steps: int) -> float:
        sizes = f"--depth={layers} --aspect-ratio={WIDTH // layers} --num-iterations={steps}"
        return timed(f"{TRAIN} {sizes}".split())

    tokenizer = timed(f"{TOKENIZER}{vocabulary}".split())
    train(20)
    few = train(20)
    steps = 20 + int((budget - tokenizer - few) / ((train(120) - few) / 100))
    seconds = tokenizer + train(steps)
    if not 0.95 <= seconds / budget <= 1.0:  # the short runs misjudged its speed
        steps = int(steps * (0.98 * budget - tokenizer) / (seconds - tokenizer))
        seconds = tokenizer + train(steps)
    scored = run_python(["-c", SCORE, str(held_out), PARAGRAPH_END], checkout, environment)
    return float(scored.split()[-1]), seconds
