"""A short training of a small model on a text: it says how hard the text is.

Shapes: B windows, T context_length, D emb_dim.
"""

import lzma
import math

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from gpt.config import GPTConfig
from gpt.data.vocabularies import Learned, learn_table
from gpt.data.windows import IGNORE_INDEX
from gpt.model import GPT
from gpt.tokenizer import Tokenizer
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.plan.cost import mean_loss, update
from gpt.training.plan.law import Trial
from gpt.training.schedule import learning_rate_factor

_MOST_STEPS, _FEWEST_STEPS = 100, 20  # about a second on two cores
_MOST_PASSES = 4  # over the text: more would say how well it can be learned by heart
_RECIPE = OptimizerConfig(lr=0.012, rest_lr=0.018, weight_decay=0.4, embedding_weight_decay=0.2)
_KNOWN, _NEW = 1_000_000, 100_000  # bytes that are compressed, of the text and of what is held out


def try_out(train: str, val: str) -> Trial:
    """Train on `train` and score `val`, in float32 on the CPU whatever a run will use."""
    table = learn_table([train], 1024, Learned.pattern, at_most=True)
    tokenizer = Tokenizer("own", table=table, pattern=Learned.pattern)
    known, new = (torch.from_numpy(tokenizer.encode_array(part).astype("int64")) for part in (train, val))
    T, B = Trial.context, Trial.batch // Trial.context
    known = F.pad(known, (0, max(0, T + 1 - len(known))))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPTConfig(
            vocab_size=tokenizer.n_vocab, context_length=T, emb_dim=64, num_heads=2, num_layers=1
        )
        model = GPT(config)
    steps = min(_MOST_STEPS, max(_FEWEST_STEPS, _MOST_PASSES * len(known) // Trial.batch))
    optimizer = build_optimizer(model, _RECIPE)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps, steps // 10, "linear"))
    places = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(known) - T, (B, 1), generator=places)
        windows = known[starts + torch.arange(T + 1)]  # (B, T + 1)
        update(model, optimizer, mean_loss(model, windows[:, :-1], windows[:, 1:]))
        schedule.step()
    rest, scored = -(len(new) - 1) % T, len(new) - 1
    inputs = F.pad(new[:-1], (0, rest)).view(-1, T)
    targets = F.pad(new[1:], (0, rest), value=IGNORE_INDEX).view(-1, T)
    nats = 0.0
    with torch.inference_mode():
        for i in range(0, len(inputs), 4 * B):
            x, y = inputs[i : i + 4 * B], targets[i : i + 4 * B]
            nats += float(mean_loss(model, x, y)) * int((y != IGNORE_INDEX).sum())
    per_token = len(val.encode("utf-8", "replace")) / len(new)
    return Trial(
        bits_per_byte=nats / scored / math.log(2) / per_token,
        table=tokenizer.n_vocab * config.emb_dim,
        seen=steps * Trial.batch * per_token,
        unique=len(train.encode("utf-8", "replace")),
        per_token=per_token,
        repeats=repeats(train, val),
    )


def repeats(train: str, val: str) -> float:
    """Bits that LZMA takes for each byte of `val` after `train`: few where it repeats what was there."""
    known, new = train.encode("utf-8", "replace")[-_KNOWN:], val.encode("utf-8", "replace")[:_NEW]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    alone, both = (len(lzma.compress(it, lzma.FORMAT_RAW, filters=filters)) for it in (known, known + new))
    return 8 * (both - alone) / len(new)
