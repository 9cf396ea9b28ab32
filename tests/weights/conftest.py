"""A GPT of the same shape as the models in other_programs.py."""

import pytest
from other_programs import randomised

from gpt import GPT, GPTConfig


@pytest.fixture
def config() -> GPTConfig:
    return GPTConfig(vocab_size=300, context_length=24, emb_dim=48, num_heads=3, num_layers=2)


@pytest.fixture
def model(config: GPTConfig) -> GPT:
    return randomised(GPT(config))
