import tracemalloc

import numpy as np
import pytest
import torch

from gpt import GPTConfig, Tokenizer
from gpt.errors import InputError
from gpt.generation import Engine, Request, Sample, Sampling
from gpt.generation.cache import Cache
from gpt.generation.samples import window_start
from tests.generation.conftest import PROMPTS, sharp, slow_greedy


def greedy(prompt: list[int], count: int, **options) -> Request:
    """A request for the likeliest tokens."""
    return Request(tokens=prompt, max_new_tokens=count, sampling=Sampling(temperature=0), **options)


def decode(engine: Engine, *requests: Request) -> list[Sample]:
    """All samples of requests that are decoded together."""
    samples = [sample for request in requests for sample in engine.add(request)]
    list(engine.run())
    return samples


@pytest.mark.parametrize(("chunk", "max_samples"), [(1, 64), (7, 1), (512, 4)])
def test_greedy_with_the_cache_is_greedy_without(model, chunk, max_samples):
    """Prompts of six lengths, one longer than the context."""
    engine = Engine(model, chunk=chunk, max_samples=max_samples)
    samples = decode(engine, *(greedy(prompt, 40) for prompt in PROMPTS))
    assert [sample.tokens for sample in samples] == [slow_greedy(model, prompt, 40) for prompt in PROMPTS]


@pytest.mark.parametrize("context", [1, 3, 16])
def test_any_context_length_slides(context):
    model = sharp(GPTConfig(vocab_size=50, context_length=context, emb_dim=16, num_heads=2, num_layers=1))
    prompts = [[1], [2, 3], list(range(20))]
    samples = decode(Engine(model), *(greedy(prompt, 50) for prompt in prompts))
    assert [sample.tokens for sample in samples] == [slow_greedy(model, prompt, 50) for prompt in prompts]


def test_log_probabilities_of_a_ragged_batch_are_the_models(model):
    """The texts have six lengths, are read together, and are longer than the context; PyTorch decodes."""
    engine = Engine(model)
    for prompt in PROMPTS:
        engine.add(Request(tokens=prompt, max_new_tokens=40, seed=1, alternatives=0))
    for token in engine.run():
        *before, newest = token.sample.tokens
        window = torch.tensor([before[window_start(len(before), 64) :]])
        with torch.no_grad():
            expected = model(window)[0, -1].log_softmax(-1)
        assert token.logprobs.chosen == pytest.approx(expected[newest].item(), abs=1e-4)


def test_samples_of_a_prompt_share_its_reading(model):
    how, read = {"tokens": [1] * 30, "max_new_tokens": 5, "seed": 0}, []
    (alone,) = decode(Engine(model), Request(**how))
    model.register_forward_pre_hook(lambda model, inputs: read.append(tuple(inputs[0].shape)))
    samples = decode(Engine(model, max_samples=4), Request(**how, samples=9))
    assert read.count((1, 30)) == 1
    assert samples[0].tokens == alone.tokens
    assert len({tuple(sample.tokens) for sample in samples}) == 9


def test_the_samples_of_a_request_share_its_prompt(model):
    """A hundred lists of these ids, and as many of their scores, would be 160 MB."""
    request = Request(tokens=[1] * 100_000, max_new_tokens=2, samples=100)
    tracemalloc.start()
    try:
        samples = decode(Engine(model), request)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8e6
    assert {len(sample.tokens) for sample in samples} == {100_002}
    # Those that have ended wait for the others of their client, without the logits of their batch.
    assert all(value.numel() == 0 for value in vars(samples[0]).values() if isinstance(value, torch.Tensor))


def test_without_a_seed_no_text_is_repeated(model):
    first, second = decode(Engine(model), *[Request(tokens=[1], max_new_tokens=12, seed=None)] * 2)
    assert first.tokens != second.tokens


def test_how_a_sample_ends(model):
    (free,) = decode(Engine(model), greedy([5], 9))
    assert (free.finished, free.new_tokens) == ("length", 9)
    end = free.tokens[3]
    (ended,) = decode(Engine(model), greedy([5], 9, end=end))
    assert ended.finished == "stop"
    assert ended.tokens == free.tokens[: free.tokens.index(end, 1) + 1]


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["the first row", "the last row", "waiting"])
def test_a_cancelled_sample_leaves_and_the_others_go_on(victim, model):
    engine, prompts = Engine(model, max_samples=2), PROMPTS[:3]
    samples = [engine.add(greedy(prompt, 20))[0] for prompt in prompts]
    for _ in range(5):
        engine.step()
    cancelled = samples.pop(victim)
    prompts.pop(victim)
    engine.cancel(cancelled)
    engine.cancel(cancelled)  # has ended already
    list(engine.run())
    assert cancelled.finished == "cancelled" and cancelled.new_tokens < 20
    assert [sample.tokens for sample in samples] == [slow_greedy(model, prompt, 20) for prompt in prompts]


def test_running_samples_get_tokens_while_a_long_prompt_is_read(model):
    engine = Engine(model, chunk=8)
    (first,) = engine.add(greedy([1], 30))
    engine.step()
    engine.add(greedy([2] * 48, 2))
    for _ in range(5):
        assert [token.sample for token in engine.step()] == [first]


def test_a_request_behind_samples_that_wait_for_their_prompt_gets_a_free_row(model):
    engine = Engine(model, max_samples=2, chunk=8)
    engine.add(greedy([2] * 48, 2, samples=3))
    (other,) = engine.add(greedy([1], 3))
    for _ in range(3):
        assert [token.sample for token in engine.step()] == [other]


def test_padding_of_the_vocabulary_is_never_drawn(model):
    """The model has 300 ids, the tokenizer 257."""
    engine = Engine(model, Tokenizer("gpt2", vocab_size=257))
    hot = Sampling(temperature=50)
    engine.add(Request(tokens=[1], max_new_tokens=200, samples=8, seed=0, sampling=hot))
    drawn = {token.id for token in engine.run()}
    assert max(drawn) <= 256 and len(drawn) > 200


def test_log_probabilities_are_those_of_the_ids_that_may_be_drawn(model):
    """The prompt's and the new token's, over the tokenizer's 257 ids; the model has 300."""
    engine = Engine(model, Tokenizer("gpt2", vocab_size=257))
    engine.add(Request(tokens=[1, 2, 3], max_new_tokens=1, echo=True, alternatives=300, seed=1))
    _, *scored = engine.run()
    for token in scored:
        likeliest = dict(token.logprobs.likeliest)
        assert sorted(likeliest) == list(range(257))
        assert sum(torch.tensor([*likeliest.values()]).exp()) == pytest.approx(1, abs=1e-5)


def test_memory_grows_twofold_up_to_the_context(config):
    cache, sizes = Cache(config, torch.zeros(())), set()
    for rows in range(1, 10):
        cache.reserve(rows, rows + 4)
        sizes.add((cache.store.shape[2], cache.store.shape[4]))
    assert sizes == {(1, 10), (2, 10), (4, 10), (8, 10), (8, 16), (16, 16)}


def test_logits_that_are_not_finite_end_their_own_text_only(model):
    model.position_embedding.weight.data[20] = torch.nan
    engine, errors = Engine(model), {}
    (failed,) = engine.add(greedy([1] * 15, 30))
    (whole,) = engine.add(greedy([2], 16))
    while engine.busy:
        engine.step()
        errors |= engine.failed
    assert (failed.finished, failed.new_tokens) == ("error", 6)
    assert (whole.finished, whole.new_tokens) == ("length", 16)
    assert "not finite" in str(errors[failed]) and list(errors) == [failed]


def test_an_error_after_a_token_is_drawn_ends_its_own_text_only(model, monkeypatch):
    engine = Engine(model)
    (failed,) = engine.add(greedy([1], 5))
    (whole,) = engine.add(greedy([2], 5))
    monkeypatch.setattr(failed, "add", lambda *_: 1 / 0)
    engine.step()
    assert list(engine.failed) == [failed] and isinstance(engine.failed[failed], ZeroDivisionError)
    list(engine.run())
    assert (failed.finished, whole.finished) == ("error", "length")


IMPOSSIBLE = {
    "a tokenizer with more tokens than the model": ({"tokenizer": Tokenizer()}, "50257 tokens, .* only 300"),
    "no samples at a time": ({"max_samples": 0}, "max_samples must be at least 1"),
    "an empty chunk": ({"chunk": 0}, "chunk must be at least 1"),
    "an unknown backend": ({"backend": "bfloat16"}, "'bfloat16': expected one of auto, pytorch"),
}


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_engine_that_cannot_be(options, message, model):
    with pytest.raises(InputError, match=message):
        Engine(model, **options)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_ids_of_any_kind_are_plain_ones(kind):
    request = greedy(kind([3, 1]), 1)
    assert request.tokens == (3, 1) and all(type(id_) is int for id_ in request.tokens)


@pytest.mark.parametrize("place", [0, 5])
def test_a_prompt_whose_scores_are_not_finite_gets_no_scores(place, model):
    """Those of the first windows; the last window is whole."""
    model.token_embedding.weight.data[7] = torch.nan
    prompt = [1] * 200
    prompt[place] = 7
    engine = Engine(model)
    engine.add(Request(tokens=prompt, max_new_tokens=0, echo=True, alternatives=1))
    with pytest.raises(InputError, match="not finite"):
        list(engine.run())


def test_a_penalty_for_a_long_prompt_costs_little_at_each_token(model):
    """Its ids are looked at once, and not at each step. The penalty is as before."""

    class Counted(list):
        read = 0

        def __getitem__(self, part):
            found = super().__getitem__(part)
            Counted.read += len(found) if isinstance(part, slice) else 0
            return found

    engine = Engine(model)
    (sample,) = engine.add(
        Request(
            tokens=[1] * 1000, max_new_tokens=20, sampling=Sampling(temperature=0, repetition_penalty=1.5)
        )
    )
    sample.beginning.tokens = Counted(sample.beginning.tokens)
    list(engine.run())
    assert Counted.read <= 21 * 64  # a window at each step
    tokens = [1] * 1000
    for _ in range(20):
        with torch.no_grad():
            logits = model(torch.tensor([tokens[window_start(len(tokens), 64) :]]))[0, -1]
        for id_ in set(tokens):
            logits[id_] *= 1 / 1.5 if logits[id_] > 0 else 1.5
        tokens.append(int(logits.argmax()))
    assert sample.tokens == tokens
