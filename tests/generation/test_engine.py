import pytest
import torch

from gpt import GPTConfig, Tokenizer
from gpt.generation import Engine, Request, Sampling
from gpt.generation.cache import Cache
from gpt.generation.samples import window_start
from tests.generation.conftest import complete, sharp, slow_greedy

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 6, 7], [250] * 40, [9], list(range(100)), [1, 2, 3, 4] * 5, [77, 3] * 31]


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def greedy(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    samples = [engine.add(Request(tokens=p, max_new_tokens=count, sampling=GREEDY))[0] for p in prompts]
    run(engine)
    return [sample.tokens for sample in samples]


@pytest.mark.parametrize(("chunk", "max_samples", "count"), [(1, 64, 40), (7, 1, 40), (512, 4, 200)])
def test_greedy_with_the_cache_is_greedy_without(model, chunk, max_samples, count):
    """Prompts of six lengths, one longer than the context; texts of more than three contexts."""
    engine = Engine(model, chunk=chunk, max_samples=max_samples)
    assert greedy(engine, PROMPTS, count) == [slow_greedy(model, prompt, count) for prompt in PROMPTS]


@pytest.mark.parametrize("context", [1, 2, 3, 5, 16])
def test_any_context_length_slides(context):
    model = sharp(GPTConfig(vocab_size=50, context_length=context, emb_dim=16, num_heads=2, num_layers=1))
    prompts = [[1], [2, 3], list(range(20))]
    assert greedy(Engine(model), prompts, 50) == [slow_greedy(model, prompt, 50) for prompt in prompts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_ragged_batch_are_close_to_the_models(model, dtype):
    """Texts of six lengths, in company and past the context, by PyTorch's way."""
    model, limit = model.to(dtype), 1e-4 if dtype == torch.float32 else 0.5
    requests = [Request(tokens=p, max_new_tokens=40, seed=1, alternatives=3) for p in PROMPTS]
    for (completion,), prompt in zip(complete(model, requests), PROMPTS, strict=True):
        tokens, new = completion.sample.tokens, completion.tokens
        for i, token in enumerate(new, len(prompt)):
            window = torch.tensor([tokens[window_start(i, 64) : i]])
            with torch.no_grad():
                expected = model(window)[0, -1].float().log_softmax(-1)
            assert token.log_probability == pytest.approx(expected[tokens[i]].item(), abs=limit)


def test_samples_of_a_prompt_share_its_reading(model, monkeypatch):
    read = []
    features = model.features
    monkeypatch.setattr(
        model, "features", lambda tokens, **more: read.append(tokens.shape) or features(tokens, **more)
    )
    complete(model, [Request(tokens=[1], max_new_tokens=1)])  # chooses a way
    read.clear()
    alone = complete(model, [Request(tokens=[1] * 30, max_new_tokens=5, seed=0)])
    engine = Engine(model, max_samples=4)
    samples = engine.add(Request(tokens=[1] * 30, max_new_tokens=5, samples=9, seed=0))
    run(engine)
    assert read.count((1, 30)) == 2
    assert samples[0].tokens == alone[0][0].sample.tokens
    assert len({tuple(sample.tokens) for sample in samples}) == 9


def test_a_seed_repeats_and_none_does_not(model):
    def text(seed):
        return complete(model, [Request(tokens=[1], max_new_tokens=12, seed=seed)])[0][0].sample.tokens

    assert text(3) == text(3)
    assert text(3) != text(4)
    assert text(None) != text(None)


def test_how_a_sample_ends(model):
    (free,) = complete(model, [Request(tokens=[5], max_new_tokens=9, sampling=GREEDY)])[0]
    assert free.sample.finished == "length"
    assert free.sample.new_tokens == 9
    end = free.sample.tokens[3]
    (ended,) = complete(model, [Request(tokens=[5], max_new_tokens=9, sampling=GREEDY, end=end)])[0]
    assert ended.sample.finished == "stop"
    assert ended.sample.tokens == free.sample.tokens[: free.sample.tokens.index(end, 1) + 1]


def test_a_cancelled_sample_leaves_and_the_others_go_on(model):
    alone = greedy(Engine(model), PROMPTS[:3], 20)
    for victim in range(3):
        engine = Engine(model, max_samples=2)  # one of them waits
        samples = [engine.add(Request(tokens=p, max_new_tokens=20, sampling=GREEDY))[0] for p in PROMPTS[:3]]
        for _ in range(5):
            engine.step()
        engine.cancel(samples[victim])
        engine.cancel(samples[victim])
        run(engine)
        assert samples[victim].finished == "cancelled"
        assert samples[victim].new_tokens < 20
        for i in {0, 1, 2} - {victim}:
            assert samples[i].tokens == alone[i]
        assert not engine.busy


def test_running_samples_get_tokens_while_a_long_prompt_is_read(model):
    engine = Engine(model, chunk=8)
    (first,) = engine.add(Request(tokens=[1], max_new_tokens=30, sampling=GREEDY))
    engine.step()
    engine.add(Request(tokens=[2] * 48, max_new_tokens=2, sampling=GREEDY))
    before = first.new_tokens
    for _ in range(5):
        assert [token.sample for token in engine.step()] == [first]
    assert first.new_tokens == before + 5


def test_padding_of_the_vocabulary_is_never_drawn(model):
    engine = Engine(model, Tokenizer("gpt2", vocab_size=257))
    request = Request(tokens=[1], max_new_tokens=200, samples=8, seed=0, sampling=Sampling(temperature=50))
    samples = engine.add(request)
    run(engine)
    drawn = {token for sample in samples for token in sample.tokens}
    assert max(drawn) <= 256 and len(drawn) > 200


def test_memory_grows_twofold_and_keeps_what_it_holds(config):
    cache, sizes = Cache(config, torch.zeros(())), set()
    for rows in range(1, 10):
        cache.reserve(rows, rows + 4)
        cache.store[:, :, rows - 1, :, : rows + 4] = rows
        assert all((cache.store[:, :, row, :, : row + 5] == row + 1).all() for row in range(rows))
        sizes.add((cache.store.shape[2], cache.store.shape[4]))
    assert sizes == {(1, 10), (2, 10), (4, 10), (8, 10), (8, 16), (16, 16)}  # the context is 16


def test_logits_that_are_not_finite_end_their_own_text_only(model):
    model.position_embedding.weight.data[20] = torch.nan
    engine, errors = Engine(model), {}
    (failed,) = engine.add(Request(tokens=[1] * 15, max_new_tokens=30, sampling=GREEDY))
    (whole,) = engine.add(Request(tokens=[2], max_new_tokens=16, sampling=GREEDY))
    while engine.busy:
        engine.step()
        errors |= engine.failed
    assert (failed.finished, failed.new_tokens) == ("error", 6)
    assert (whole.finished, whole.new_tokens) == ("length", 16)
    assert "not finite" in str(errors[failed]) and list(errors) == [failed]
