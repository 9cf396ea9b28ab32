"""What a person changes in a model counts in generation: greedy `generate` is greedy by `forward`."""

import copy
from types import MethodType

import pytest
import torch
from torch import nn

from gpt import GPT, GPTConfig, MultiHeadAttention, generate
from gpt.generation import decoding
from gpt.generation.compiled import Compiled
from gpt.generation.decoding import backend_of
from gpt.generation.forward import Forward
from tests.generation.conftest import sharp, slow_greedy

PROMPTS = [[5, 6, 7], list(range(10, 30))]
PROGRAM = "gpt: PyTorch decodes, as the compiled program does not compute this model: "
READ_AGAIN = "each token reads its text again"
pytestmark = pytest.mark.usefixtures("built")


@pytest.fixture(autouse=True)
def _tells_again():
    decoding.notice_once.cache_clear()


class LinearWithLoRA(nn.Module):
    """The layer of the book's appendix E."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.A = nn.Parameter(torch.randn(linear.in_features, 4) * 0.3)
        self.B = nn.Parameter(torch.randn(4, linear.out_features) * 0.3)

    def forward(self, x):
        return self.linear(x) + x @ self.A @ self.B


class Capped(GPT):
    def forward(self, tokens, **options):
        return 5 * torch.tanh(super().forward(tokens, **options) / 5)


class WithoutCache(MultiHeadAttention):
    def forward(self, x, *, cache=None, **options):
        return -super().forward(x)


class PlainForward(GPT):
    def forward(self, tokens):
        return super().forward(tokens).roll(1, dims=-1)


def own_class(path, kind):
    """The module at `path` becomes one of a subclass, in place."""
    return lambda model: setattr(model.get_submodule(path), "__class__", kind)


def adapted(model):
    model.blocks[0].attention.W_value = LinearWithLoRA(model.blocks[0].attention.W_value)


def hooked(model):
    model.blocks[0].register_forward_hook(lambda module, inputs, out: out * 1.1)


def narrow(model):
    model.blocks[0].feed_forward.up, model.blocks[0].feed_forward.down = nn.Linear(64, 96), nn.Linear(96, 64)


def method(model):
    norm = model.final_norm
    norm.forward = MethodType(lambda self, x: -nn.LayerNorm.forward(self, x), norm)


def added(model):
    model.register_parameter("shift", nn.Parameter(torch.ones(64)))


# What is changed, and whether a cache still gives the model's logits.
CHANGES = {
    "book-style LoRA": (adapted, True),
    "capped logits": (own_class("", Capped), True),
    "a hook": (hooked, True),
    "a replaced method": (method, True),
    "another epsilon": (lambda model: setattr(model.final_norm, "eps", 1.0), True),
    "an added parameter": (added, True),
    "a narrow layer": (narrow, True),
    "attention without a cache": (own_class("blocks.0.attention", WithoutCache), False),
    "an own forward without caches": (own_class("", PlainForward), False),
}


@pytest.mark.parametrize(("change", "is_cached"), CHANGES.values(), ids=CHANGES)
def test_a_changed_model_is_computed_by_its_own_forward(change, is_cached, capsys):
    """Past the context, after the program was in use and has noted these weights."""
    model = sharp()
    assert isinstance(backend_of(model), Compiled)
    change(model)
    another = sharp()
    change(another)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    written = generate(model, PROMPTS, max_new_tokens=30, temperature=0)
    assert written == [slow_greedy(model, prompt, 30) for prompt in PROMPTS]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    for each in (model, another):
        backend = backend_of(each)
        assert isinstance(backend, Forward) and backend.cached == is_cached
    program, *cache = capsys.readouterr().err.splitlines()
    assert program.startswith(PROGRAM)
    assert len(cache) == (0 if is_cached else 1) and all(READ_AGAIN in line for line in cache)


@pytest.mark.parametrize("kind", ["SiLU", "a scaled residual"])
def test_edits_of_freshly_made_models_are_seen(kind):
    """Whose residual branches add little, in bfloat16, where results may differ most."""
    config = GPTConfig(vocab_size=512, context_length=64, emb_dim=128, num_heads=2, num_layers=4)
    model = GPT(config).bfloat16()
    assert isinstance(backend_of(model), Compiled)
    for block in model.blocks:
        if kind == "SiLU":
            block.feed_forward.activation = nn.SiLU()
        else:
            block.register_forward_hook(lambda module, args, out: args[0] + (out - args[0]) / 2)
    assert isinstance(backend_of(model), Forward)


def test_a_cache_that_changes_logits_is_not_used(capsys):
    """As positions that are counted from the first token given."""
    model, counted = sharp(), torch.arange(32)
    original = model.features
    model.features = lambda tokens, positions=None, **options: original(
        tokens, positions=counted[: tokens.shape[1]], **options
    )
    written = generate(model, PROMPTS, max_new_tokens=20, temperature=0, backend="pytorch")
    assert written == [slow_greedy(model, prompt, 20) for prompt in PROMPTS]
    assert READ_AGAIN in capsys.readouterr().err


def test_compile_in_place_and_its_wrapper_are_the_model():
    model = sharp()
    expected = slow_greedy(model, [1, 2], 8)
    compiled = torch.compile(copy.deepcopy(model))
    model.compile()
    for form in (model, compiled):
        assert generate(form, [[1, 2]], max_new_tokens=8, temperature=0) == [expected]
