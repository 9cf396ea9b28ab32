"""Another model around `MultiHeadAttention`: it reads numbers instead of words and predicts the next one.

    python scripts/examples/another_model.py

The cells (`# %%`) run one by one in editors that support them. This is not a language model: the attention
module takes any (batch, tokens, width), and its output may have another width.

Shapes: B series, T times, D width of a time inside the model.
"""

# %% [markdown]
# ## The model
# Each value becomes a vector, two blocks of attention look back over the series, and a last layer gives the
# change to the next value. The residual connections and the norms around the attention are written here.

# %%
import argparse

import torch
from torch import Tensor, nn

from gpt.attention import MultiHeadAttention

WIDTH, HEADS, LONGEST = 32, 4, 32


class Block(nn.Module):
    """Attention to earlier times, then a feed-forward at each time: (B, T, D) -> (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.step_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = MultiHeadAttention(WIDTH, WIDTH, LONGEST, dropout=0.0, num_heads=HEADS)
        self.step = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.step(self.step_norm(x))


class Forecaster(nn.Module):
    """The next value at each time, from that time's and all earlier ones: (B, T) -> (B, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(1, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LONGEST, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, series: Tensor) -> Tensor:
        x = self.value(series[..., None]) + self.position[: series.shape[1]]  # (B, T, D)
        return series + self.out(self.blocks(x))[..., 0]  # what changes from one value to the next


# %% [markdown]
# ## The series
# The sum of two sine waves of unknown frequencies and phases: a few values say little, many determine the
# rest. A model that predicts them must use earlier values.


# %%
def waves(count: int, generator: torch.Generator) -> Tensor:
    """Series of LONGEST + 1 values each, (count, LONGEST + 1)."""
    frequency = 0.2 + 0.8 * torch.rand(count, 2, 1, generator=generator)
    phase = 2 * torch.pi * torch.rand(count, 2, 1, generator=generator)
    times = torch.arange(LONGEST + 1)
    return torch.sin(frequency * times + phase).sum(dim=1)


# %% [markdown]
# ## Training and evaluation
# The forecast without a model is the last value again.


# %%
def train(steps: int, seed: int = 0) -> Forecaster:
    """A forecaster trained on `steps` batches of new series."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Forecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        series = waves(64, generator)
        loss = (model(series[:, :-1]) - series[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def errors(model: Forecaster, seed: int = 1) -> dict[str, float]:
    """Mean squared errors on the second half of 256 held-out series."""
    series = waves(256, torch.Generator().manual_seed(seed))
    half = LONGEST // 2
    truth = series[:, half + 1 :]
    forecasts = {"the last value": series[:, half:-1], "the model": model(series[:, :-1])[:, half:]}
    return {name: (forecast - truth).square().mean().item() for name, forecast in forecasts.items()}


# %%
def main() -> None:
    parser = argparse.ArgumentParser(description="Train a forecaster and compare it with the last value.")
    parser.add_argument("--steps", type=int, default=400)
    model = train(parser.parse_args().steps)
    for name, error in errors(model).items():
        print(f"{name:<15} mean squared error {error:.4f}")


if __name__ == "__main__":
    main()
