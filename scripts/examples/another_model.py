"""Another model around `MultiHeadAttention`: it reads numbers instead of words, and foresees the next one.

    python scripts/examples/another_model.py

The cells (`# %%`) run one by one in editors that know them. Nothing here is a language model: the attention
module takes any (batch, tokens, width), and gives back another width if asked to.

Shapes: B series, T times, D width of a time inside the model.
"""

# %% [markdown]
# ## The model
# A value becomes a vector, two rounds of attention look back over the series, and a last layer gives the
# change to the value that comes next. Only the residual sums and the norms around the attention are new here.

# %%
import argparse

import torch
from torch import Tensor, nn

from gpt.attention import MultiHeadAttention

WIDTH, HEADS, LONGEST = 32, 4, 32


class Round(nn.Module):
    """Attention over what came before, then a step for each time on its own: (B, T, D) -> (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_step = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = MultiHeadAttention(WIDTH, WIDTH, LONGEST, dropout=0.0, num_heads=HEADS)
        self.step = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.step(self.before_step(x))


class Forecaster(nn.Module):
    """The next value at each time, from that time's and all earlier ones: (B, T) -> (B, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(1, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LONGEST, WIDTH))
        self.rounds = nn.Sequential(Round(), Round())
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, series: Tensor) -> Tensor:
        x = self.value(series[..., None]) + self.position[: series.shape[1]]  # (B, T, D)
        return series + self.out(self.rounds(x))[..., 0]  # what changes from one value to the next


# %% [markdown]
# ## The series
# Two sine waves of unknown frequencies and phases: from a few values nothing can be told, from many the rest
# follows. Whoever foresees them must look back.


# %%
def waves(count: int, generator: torch.Generator) -> Tensor:
    """Series of LONGEST + 1 values each, (count, LONGEST + 1)."""
    frequency = 0.2 + 0.8 * torch.rand(count, 2, 1, generator=generator)
    phase = 2 * torch.pi * torch.rand(count, 2, 1, generator=generator)
    times = torch.arange(LONGEST + 1)
    return torch.sin(frequency * times + phase).sum(dim=1)


# %% [markdown]
# ## Training, and what it is worth
# Two forecasts that need no model set the scale: the last value again, and a line through the last two.


# %%
def train(steps: int, seed: int = 0) -> Forecaster:
    """A forecaster that has seen `steps` batches of fresh series."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for _ in range(steps):
        series = waves(64, generator)
        loss = (model(series[:, :-1]) - series[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def errors(model: Forecaster, seed: int = 1) -> dict[str, float]:
    """Mean squared errors in the second half of 256 series that no training batch had."""
    series = waves(256, torch.Generator().manual_seed(seed))
    half = LONGEST // 2
    last, before, truth = series[:, half:-1], series[:, half - 1 : -2], series[:, half + 1 :]
    forecasts = {
        "the last value again": last,
        "a straight line through the last two": 2 * last - before,
        "the model": model(series[:, :-1])[:, half:],
    }
    return {name: (forecast - truth).square().mean().item() for name, forecast in forecasts.items()}


# %%
def main() -> None:
    parser = argparse.ArgumentParser(description="Train a forecaster and compare it with two simple rules.")
    parser.add_argument("--steps", type=int, default=400)
    model = train(parser.parse_args().steps)
    for name, error in errors(model).items():
        print(f"{name:<37} mean squared error {error:.4f}")

    # The module also says where it looked, if asked: a row for each time, a head after another.
    x = model.value(waves(1, torch.Generator().manual_seed(2))[:, :-1, None]) + model.position
    first = model.rounds[0]
    _, weights = first.attention(first.before_attention(x), need_weights=True)  # (1, heads, T, T)
    print("what the last time looks at most, in steps back:")
    for head, row in enumerate(weights[0, :, -1]):
        back = [LONGEST - 1 - int(time) for time in row.topk(3).indices]
        print(f"  head {head}: {', '.join(map(str, back))}")


if __name__ == "__main__":
    main()
