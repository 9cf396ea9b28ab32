"""What a person changes in a model counts in generation: greedy `generate` is greedy by `forward`."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from gpt import GPT, GPTConfig, MultiHeadAttention, generate
from tests.generation.conftest import sharp, slow_greedy

CONFIG = GPTConfig(vocab_size=300, context_length=32, emb_dim=32, num_heads=4, num_layers=2)


class LinearWithLoRA(nn.Module):
    """The layer of the book's appendix E."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.A = nn.Parameter(torch.randn(linear.in_features, 4) * 0.3)
        self.B = nn.Parameter(torch.randn(4, linear.out_features) * 0.3)

    def forward(self, x):
        return self.linear(x) + x @ self.A @ self.B


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Reversed(MultiHeadAttention):
    def forward(self, x, **options):
        return -super().forward(x, **options)


class WithoutCache(MultiHeadAttention):
    def forward(self, x, *, cache=None, **options):
        return -super().forward(x)


class PlainForward(GPT):
    def forward(self, tokens):
        return super().forward(tokens).roll(1, dims=-1)


class OwnFeatures(GPT):
    def features(self, tokens, **options):
        return super().features(tokens, **options).flip(-1)


def linear_layers(model):
    for block in model.blocks:
        for layer in ("W_query", "W_key", "W_value", "out_proj"):
            yield block.attention, layer
        for layer in ("up", "down"):
            yield block.feed_forward, layer


def book_lora(model, names=("W_query", "W_key", "W_value", "out_proj", "up", "down")):
    for parent, name in linear_layers(model):
        if name in names:
            setattr(parent, name, LinearWithLoRA(getattr(parent, name)))


def subclassed(kind):
    def change(model):
        for parent, name in linear_layers(model):
            getattr(parent, name).__class__ = kind

    return change


def attention(kind):
    def change(model):
        for block in model.blocks:
            block.attention.__class__ = kind

    return change


def hooked(*path, pre=False):
    """A hook on the module at `path`."""

    def change(model):
        module = model.get_submodule(".".join(path))
        if pre:
            module.register_forward_pre_hook(lambda module, args: (args[0] * 3, *args[1:]))
        else:
            module.register_forward_hook(lambda module, args, result: result.roll(1, dims=-1))

    return change


def pruned(model):
    for parent, name in linear_layers(model):
        prune.l1_unstructured(getattr(parent, name), "weight", amount=0.6)


def method_replaced(model):
    layer = model.blocks[0].feed_forward.up
    layer.forward = types.MethodType(lambda self, x: -nn.Linear.forward(self, x), layer)


def own_class(kind):
    def change(model):
        model.__class__ = kind

    return change


CHANGES = {
    "book-style LoRA": book_lora,
    "a subclass of Linear": subclassed(Doubled),
    "a subclass of MultiHeadAttention": attention(Reversed),
    "attention that takes no cache": attention(WithoutCache),
    "a hook on a projection": hooked("blocks", "0", "attention", "W_key"),
    "a pre-hook on a layer": hooked("blocks", "1", "feed_forward", "down", pre=True),
    "a hook on a block": hooked("blocks", "1"),
    "pruning": pruned,
    "a replaced method": method_replaced,
    "an own forward without caches": own_class(PlainForward),
    "own features": own_class(OwnFeatures),
}


def check(model, *, first=10):
    """Greedy generation is greedy by forward past the context, for two prompts of different lengths."""
    prompts = [[5, 6, 7], list(range(first, first + 20))]
    expected = [slow_greedy(model, prompt, 24) for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=24, temperature=0) == expected
    assert expected != [slow_greedy(sharp(CONFIG), prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_counts(name):
    model = sharp(CONFIG)
    CHANGES[name](model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    check(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("wrapped", [True, False])
def test_peft_lora_counts(wrapped):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    names = ["W_query", "W_key", "W_value", "out_proj", "up", "down"]
    model = sharp(CONFIG)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, lora_dropout=0.5))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    adapted.eval()
    check(adapted if wrapped else model)


def test_compile_in_place_and_its_wrapper_are_the_model():
    model = sharp(CONFIG)
    expected = slow_greedy(model, [1, 2], 8)
    compiled = torch.compile(copy.deepcopy(model))
    model.compile()
    for one in (model, compiled):
        assert generate(one, [[1, 2]], max_new_tokens=8, temperature=0) == [expected]
