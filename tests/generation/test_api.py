import pytest
import torch

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.errors import InputError
from gpt.generation import stream_samples
from tests.generation.conftest import sharp, slow_greedy

BYTES = Tokenizer("gpt2", vocab_size=257)


def test_a_tensor_comes_back_longer(model):
    prompts = torch.randint(0, 300, (3, 10))
    given = generate(model, prompts, max_new_tokens=7, temperature=0)
    assert given.dtype == prompts.dtype
    assert given.tolist() == [slow_greedy(model, row, 7) for row in prompts.tolist()]
    assert generate(model, torch.zeros(0, 3, dtype=torch.int64), max_new_tokens=7).shape == (0, 10)


def test_samples_that_are_not_wanted_are_named(model):
    with pytest.raises(InputError, match=r"^num_samples must be at least 1"):
        stream_samples(model, BYTES, "Ab", max_new_tokens=1, num_samples=0)


def test_sample_k_is_the_same_in_any_batch(model):
    how = {"max_new_tokens": 9, "seed": 4}
    five = generate(model, [[1, 2, 3]] * 5, **how)
    assert len(set(map(tuple, five))) == 5
    _, first, _, second = generate(model, [[9], [1, 2, 3], [8, 8], [1, 2, 3]], **how)
    assert [first, second] == five[:2]


def test_the_model_is_left_in_its_mode(model):
    model.train()
    generate(model, torch.tensor([[1]]), max_new_tokens=2)
    assert model.training
    assert model.head.weight.requires_grad and not model.head.weight.is_inference()


BAD = {
    "one dimension": (torch.tensor([1, 2]), 1, r"\(2,\)"),
    "an empty prompt": ([[1], []], 1, "at least one token"),
    "nothing to write": ([[1]], 0, "max_new_tokens"),
    "half a token": ([[1, 2.5]], 1, "token id 2.5"),
    "an id too large": ([[300]], 1, "token id 300"),
}


@pytest.mark.parametrize(("tokens", "count", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(tokens, count, message, model):
    with pytest.raises(InputError, match=message):
        generate(model, tokens, max_new_tokens=count)


@pytest.fixture
def writer() -> GPT:
    """A model of bytes."""
    return sharp(GPTConfig(vocab_size=257, context_length=64, emb_dim=32, num_heads=4, num_layers=2))


def texts(writer: GPT, count: int = 1, **settings) -> tuple[list[str], list[int]]:
    """What samples of a prompt write, and whose piece came when."""
    texts, order = [""] * count, []
    how = {"max_new_tokens": 80, "num_samples": count, "seed": 2, **settings}
    for k, piece in stream_samples(writer, BYTES, "Ab", **how):
        texts[k] += piece
        order.append(k)
    return texts, order


def test_the_pieces_are_the_text_up_to_a_stop_string(writer):
    (tokens,) = generate(writer, [BYTES.encode("Ab")], max_new_tokens=80, seed=2)
    new = tokens[2 : tokens.index(BYTES.eot)] if BYTES.eot in tokens else tokens[2:]
    (whole,), pieces = texts(writer)
    assert whole == BYTES.decode(new) and len(pieces) > 10
    stop = whole[10:13]
    assert texts(writer, stop=[stop])[0] == [whole.partition(stop)[0]]


def test_samples_are_streamed_together(writer):
    three, order = texts(writer, 3)
    assert three[:1] == texts(writer)[0]
    assert len(set(three)) == 3
    assert order != sorted(order)
