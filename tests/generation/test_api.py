import pytest
import torch

from gpt import GPT, GPTConfig, Tokenizer, generate
from gpt.errors import InputError
from gpt.generation import Sampling, stream, stream_samples
from tests.generation.conftest import sharp, slow_greedy

BYTES = Tokenizer("gpt2", vocab_size=257)


@pytest.fixture
def writer() -> GPT:
    return sharp(GPTConfig(vocab_size=257, context_length=64, emb_dim=32, num_heads=4, num_layers=2))


def test_a_tensor_comes_back_longer(model):
    prompts = torch.randint(0, 300, (3, 10))
    given = generate(model, prompts, max_new_tokens=7, temperature=0)
    assert given.shape == (3, 17) and given.dtype == prompts.dtype
    assert given.tolist() == [slow_greedy(model, row, 7) for row in prompts.tolist()]


def test_prompts_of_different_lengths(model):
    prompts = [[1], [2, 3, 4], [5, 6]]
    given = generate(model, prompts, max_new_tokens=7, temperature=0)
    assert given == [slow_greedy(model, prompt, 7) for prompt in prompts]


def test_sample_k_is_the_same_in_any_batch(model):
    prompt = torch.tensor([[1, 2, 3]])
    five = generate(model, prompt.expand(5, -1), max_new_tokens=9, seed=4)
    assert len(set(map(tuple, five.tolist()))) == 5
    assert torch.equal(generate(model, prompt.expand(2, -1), max_new_tokens=9, seed=4), five[:2])
    mixed = generate(model, [[9], [1, 2, 3], [8, 8], [1, 2, 3]], max_new_tokens=9, seed=4)
    assert [mixed[1], mixed[3]] == five[:2].tolist()


def test_the_model_is_left_in_its_mode(model):
    model.train()
    generate(model, torch.tensor([[1]]), max_new_tokens=2)
    assert model.training
    assert model.head.weight.requires_grad and not model.head.weight.is_inference()


def test_rows_that_ended_are_filled_up(model):
    free = generate(model, [[1], [2]], max_new_tokens=12, temperature=0)
    end = free[0][4]
    given = generate(model, torch.tensor([[1], [2]]), max_new_tokens=12, temperature=0, end=end)
    for row, text in zip(given.tolist(), free, strict=True):
        stop = text.index(end, 1) + 1 if end in text[1:] else len(text)
        assert row[:stop] == text[:stop]
        assert set(row[stop:]) <= {end}


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (torch.tensor([1, 2]), {}, r"\(2,\)"),
        (torch.zeros(2, 0, dtype=torch.long), {}, r"\(2, 0\)"),
        ([[1], []], {}, "at least one token"),
        (torch.tensor([[1]]), {"temperature": -1}, "temperature"),
        (torch.tensor([[1]]), {"top_k": 0}, "top_k"),
        (torch.tensor([[1]]), {"max_new_tokens": -1}, "max_new_tokens"),
        (torch.tensor([[300]]), {}, "300"),
        (torch.tensor([[1.0, 2.0]]), {}, "token id 1.0"),
        ([[1, 2.5]], {}, "token id 2.5"),
        ([["a"]], {}, "token id a"),
    ],
)
def test_bad_arguments_are_named(model, tokens, options, message):
    with pytest.raises(InputError, match=message):
        generate(model, tokens, **{"max_new_tokens": 1, **options})


def test_the_stream_is_the_text(writer):
    prompt = "Ab"
    tokens = generate(writer, [BYTES.encode(prompt)], max_new_tokens=80, seed=2, end=BYTES.eot)[0]
    expected = BYTES.decode([t for t in tokens[2:] if t != BYTES.eot])
    pieces = list(stream(writer, BYTES, prompt, max_new_tokens=80, seed=2))
    assert "".join(pieces) == expected
    assert len(pieces) > 10


def test_the_stream_ends_before_a_stop_string(writer):
    whole = "".join(stream(writer, BYTES, "Ab", max_new_tokens=80, seed=2))
    stop = whole[10:13]
    given = "".join(stream(writer, BYTES, "Ab", max_new_tokens=80, seed=2, stop=[stop]))
    assert given == whole[: whole.index(stop)]


def test_samples_are_streamed_together(writer):
    texts = ["", "", ""]
    order = []
    for k, piece in stream_samples(writer, BYTES, "Ab", max_new_tokens=20, num_samples=3, seed=2):
        texts[k] += piece
        order.append(k)
    assert texts[0] == "".join(stream(writer, BYTES, "Ab", max_new_tokens=20, seed=2))
    assert len(set(texts)) == 3
    assert order != sorted(order)


def test_end_of_text_in_a_prompt_is_plain_unless_asked_for(writer):
    settings = {"max_new_tokens": 8, "sampling": Sampling(temperature=0)}
    plain = "".join(stream(writer, BYTES, "<|endoftext|>", **settings))
    special = "".join(stream(writer, BYTES, "<|endoftext|>", allow_special=True, **settings))
    assert special == "".join(stream(writer, BYTES, "", **settings))
    assert plain != special
