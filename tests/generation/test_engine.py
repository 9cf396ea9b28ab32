import pytest
import torch

from gpt import GPTConfig, Tokenizer
from gpt.errors import InputError
from gpt.generation import Engine, Request, Sampling, window_start
from gpt.generation.cache import Cache
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


def test_samples_do_not_depend_on_how_many_there_are(model):
    def texts(**changes):
        request = Request(tokens=[1, 2], max_new_tokens=12, seed=7, **changes)
        return [one.sample.tokens for one in complete(model, [request])[0]]

    eight = texts(samples=8)
    assert len({tuple(text) for text in eight}) == 8
    assert texts(samples=3) == eight[:3]


def test_samples_of_a_prompt_share_its_reading(model, monkeypatch):
    read = []
    features = model.features
    monkeypatch.setattr(
        model, "features", lambda tokens, **more: read.append(tokens.shape) or features(tokens, **more)
    )
    engine = Engine(model, max_samples=4)
    engine.add(Request(tokens=[1] * 30, max_new_tokens=3, samples=9, seed=0))
    read.clear()  # what the choice of a way has read
    run(engine)
    assert read.count((1, 30)) == 1
    assert sum(rows for rows, columns in read if columns == 1) == 9 * 2


def test_a_seed_repeats_and_none_does_not(model):
    def text(seed):
        return complete(model, [Request(tokens=[1], max_new_tokens=12, seed=seed)])[0][0].sample.tokens

    assert text(3) == text(3)
    assert text(3) != text(4)
    assert text(None) != text(None)


def test_log_probabilities_are_the_models(model):
    request = Request(
        tokens=[4, 5], max_new_tokens=6, sampling=Sampling(temperature=2.0, top_k=9), seed=1, alternatives=4
    )
    (completion,) = complete(model, [request])[0]
    tokens = completion.sample.tokens
    with torch.no_grad():
        expected = model(torch.tensor([tokens]))[0].log_softmax(-1)
    for i, token in enumerate(completion.tokens):
        at = expected[1 + i]
        assert token.log_probability == pytest.approx(at[tokens[2 + i]].item(), abs=1e-4)
        likeliest = at.topk(4)
        assert [id_ for id_, _ in token.alternatives] == likeliest.indices.tolist()
        assert [p for _, p in token.alternatives] == pytest.approx(likeliest.values.tolist(), abs=1e-4)


def test_how_a_sample_ends(model):
    (free,) = complete(model, [Request(tokens=[5], max_new_tokens=9, sampling=GREEDY)])[0]
    assert free.sample.finished == "length"
    assert free.sample.new_tokens == 9
    end = free.sample.tokens[3]
    (ended,) = complete(model, [Request(tokens=[5], max_new_tokens=9, sampling=GREEDY, end=end)])[0]
    assert ended.sample.finished == "stop"
    assert ended.sample.tokens == free.sample.tokens[: free.sample.tokens.index(end, 1) + 1]
    (none,) = complete(model, [Request(tokens=[5], max_new_tokens=0)])[0]
    assert none.sample.finished == "length" and none.tokens == []


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
        assert engine.running == 0


def test_running_samples_get_tokens_while_a_long_prompt_is_read(model):
    engine = Engine(model, chunk=8)
    (first,) = engine.add(Request(tokens=[1], max_new_tokens=30, sampling=GREEDY))
    engine.step()
    engine.add(Request(tokens=[2] * 48, max_new_tokens=2, sampling=GREEDY))
    before = first.new_tokens
    for _ in range(5):
        engine.step()
        assert engine.running == 1
    assert first.new_tokens == before + 5


def test_a_text_that_may_become_long_takes_memory_as_it_grows():
    config = GPTConfig(vocab_size=50, context_length=512, emb_dim=16, num_heads=2, num_layers=1)
    engine, columns = Engine(sharp(config)), set()
    (sample,) = engine.add(Request(tokens=[1] * 70, max_new_tokens=10**9, sampling=GREEDY))
    while sample.new_tokens < 300:
        engine.step()
        columns.add(engine._cache.store.shape[4])
    assert columns == {192, 384}


def test_rows_that_come_one_by_one_are_seldom_copied(model):
    engine, stores = Engine(model), set()
    for _ in range(16):
        engine.add(Request(tokens=[1] * 5, max_new_tokens=50, sampling=GREEDY))
        engine.step()
        stores.add(engine._cache.store.shape[2])
    assert stores == {1, 2, 4, 8, 16}


def test_padding_of_the_vocabulary_is_never_drawn(model):
    engine = Engine(model, Tokenizer("gpt2", vocab_size=257))
    request = Request(tokens=[1], max_new_tokens=200, samples=8, seed=0, sampling=Sampling(temperature=50))
    samples = engine.add(request)
    run(engine)
    drawn = {token for sample in samples for token in sample.tokens}
    assert max(drawn) <= 256 and len(drawn) > 200


@pytest.mark.parametrize("context", [1, 2, 3, 7, 64])
def test_the_window_holds_between_half_a_context_and_a_whole(context):
    starts = [window_start(length, context) for length in range(1, 5 * context)]
    assert starts == sorted(starts)
    for length, start in enumerate(starts, 1):
        assert length - start <= context
        assert start == 0 if length <= context else length - start >= min(context, context - context // 2)


def test_a_token_outside_the_vocabulary_is_refused(model):
    with pytest.raises(InputError, match="300"):
        complete(model, [Request(tokens=[300], max_new_tokens=1)])


def test_rows_keep_their_tokens_while_others_come_and_go(config):
    """Their memory against a dictionary that does the same."""
    cache, rows = Cache(config, torch.zeros(())), {}
    for i in range(9):
        rows[len(rows)] = i
        cache.reserve(len(rows), i % 5)
        cache.store[:, :, len(rows) - 1, :, : i % 5] = torch.tensor([i, -i]).view(2, 1, 1, 1)
        if i % 3 == 2:
            last = len(rows) - 1
            cache.copy(last, 1, rows[last] % 5)
            cache.clear(last)
            rows[1] = rows.pop(last)
        for row, number in rows.items():
            assert (cache.store[:, 0, row, :, : number % 5] == number).all()
            assert (cache.store[:, 1, row, :, : number % 5] == -number).all()
        assert (cache.store[:, :, len(rows) :] == 0).all()
