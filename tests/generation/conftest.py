"""Models whose greedy text is not one token over and over, and the slow way to write with them."""

import os
import shutil

import pytest
import torch

from gpt import GPT, GPTConfig
from gpt.generation import build

# A shape that the compiled program takes.
CONFIG = GPTConfig(vocab_size=301, context_length=32, emb_dim=64, num_heads=4, num_layers=2)
# Their lengths are six; three are longer than this context.
PROMPTS = [[5, 6, 7], [250] * 40, [9], list(range(100)), [1, 2, 3, 4] * 5, [77, 3] * 31]


def sharp(config: GPTConfig = CONFIG, seed: int = 0, std: float = 0.3) -> GPT:
    """A model with large random weights: its likeliest token depends on all it sees."""
    torch.manual_seed(seed)
    model = GPT(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if "norm.weight" in name else 0.0, std=std)
    return model


@pytest.fixture
def model() -> GPT:
    return sharp(GPTConfig(vocab_size=300, context_length=64, emb_dim=32, num_heads=4, num_layers=2))


@pytest.fixture(scope="session")
def cache_with_program(tmp_path_factory) -> str:
    """A cache folder of its own with the compiled program: the compiler takes seconds."""
    if shutil.which("c++") is None:
        pytest.skip("there is no compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CACHE", str(tmp_path_factory.mktemp("built")))
        assert build.build()
        return os.environ["GPT_CACHE"]


@pytest.fixture
def built(cache_with_program, monkeypatch):
    """The compiled program is in the cache."""
    monkeypatch.setenv("GPT_CACHE", cache_with_program)


def slow_greedy(model: GPT, prompt: list[int], count: int) -> list[int]:
    """No cache: the window, which moves by half a context when it is full, is read again for each token."""
    context = model.config.context_length
    tokens, start = list(prompt), 0
    for _ in range(count):
        while len(tokens) - start > context:
            start += max(1, context // 2)
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens[start:]]))[0, -1].argmax()))
    return tokens
