"""A short training of a small model on a text: it says how hard the text is.

Shapes: B windows, T context_length, D emb_dim.
"""

import lzma
import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from gpt.config import GPTConfig
from gpt.data.vocabularies import Learned, learn_table
from gpt.data.windows import IGNORE_INDEX
from gpt.model import GPT
from gpt.tokenizer import Tokenizer
from gpt.training.loss import linear_cross_entropy
from gpt.training.optimizers import OptimizerConfig, build_optimizer
from gpt.training.plan.law import Trial
from gpt.training.schedule import learning_rate_factor

_MOST_STEPS, _FEWEST_STEPS = 100, 20  # half a second on two cores
_MOST_PASSES = 4  # over the text: more would say how well it can be learned by heart
_RECIPE = OptimizerConfig(lr=0.012, rest_lr=0.018, weight_decay=0.4, embedding_weight_decay=0.2)
_COMPRESSED = 1_000_000, 100_000  # bytes of the text, at its end, and of what is held out


def try_out(train: str, val: str) -> Trial:
    """Train on `train` and score `val`, in float32 on the CPU whatever a run will use."""
    wanted = Learned(n_vocab=1024)
    table = learn_table([train], wanted.n_vocab, wanted.pattern, at_most=True)
    tokenizer = Tokenizer("own", table=table, pattern=wanted.pattern)
    learned, scored = (torch.from_numpy(tokenizer.encode_array(text).astype("int64")) for text in (train, val))
    T, B = Trial.context, Trial.batch // Trial.context
    learned = F.pad(learned, (0, max(0, T + 1 - len(learned))))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"emb_dim": Trial.emb_dim, "num_layers": Trial.num_layers, "num_heads": Trial.emb_dim // 32}
        model = GPT(GPTConfig(vocab_size=tokenizer.n_vocab, context_length=T, **sizes))
    steps = min(_MOST_STEPS, max(_FEWEST_STEPS, _MOST_PASSES * len(learned) // Trial.batch))
    optimizer = build_optimizer(model, _RECIPE)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps, steps // 10, "linear"))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(model.features(x).flatten(0, 1), model.head.weight, y.flatten())

    places = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(learned) - T, (B, 1), generator=places)
        windows = learned[starts + torch.arange(T + 1)]  # (B, T + 1)
        torch.autograd.backward(loss(windows[:, :-1], windows[:, 1:]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    targets = F.pad(scored[1:], (0, -(len(scored) - 1) % T), value=IGNORE_INDEX).view(-1, T)
    inputs = F.pad(scored[:-1], (0, -(len(scored) - 1) % T)).view(-1, T)
    with torch.inference_mode():
        parts = zip(inputs.split(4 * B), targets.split(4 * B), strict=True)
        nats = sum(float(loss(x, y)) * int((y != IGNORE_INDEX).sum()) for x, y in parts)
    per_token = len(val.encode("utf-8", "replace")) / len(scored)
    return Trial(
        bits_per_byte=nats / (len(scored) - 1) / math.log(2) / per_token,
        table=tokenizer.n_vocab * Trial.emb_dim,
        seen=steps * Trial.batch * per_token,
        unique=len(train.encode("utf-8", "replace")),
        per_token=per_token,
        repeats=repeats(train, val),
    )


def repeats(train: str, val: str) -> float:
    """Bits that LZMA takes for each byte of `val` after `train`: few where it repeats what was there."""
    before, after = _COMPRESSED
    known, new = train.encode("utf-8", "replace")[-before:], val.encode("utf-8", "replace")[:after]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
    alone, both = (len(lzma.compress(part, lzma.FORMAT_RAW, filters=filters)) for part in (known, known + new))
    return 8 * (both - alone) / len(new)
