"""Beside the plain loss, and what a run does with it."""

from itertools import islice

import pytest
import torch
from tiny_runs import trainer
from torch.nn import functional as F

from gpt.config import GPTConfig
from gpt.data.builtin import python_docs
from gpt.data.module import TokenData
from gpt.text.vocabulary import Learned, learn
from gpt.training import module
from gpt.training.module import LanguageModel
from gpt.training.sampled import sampled_cross_entropy, sampled_share


def leaves():
    features = torch.randn(50, 16, requires_grad=True)
    weight = torch.randn(97, 16, requires_grad=True)
    return features, weight, torch.randint(0, 97, (50,))


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("ignored", [0, 3])
def test_a_sample_has_the_targets_and_others_that_count_for_those_left_out(rate, ignored):
    """Beside the plain loss over all ids: others that are not drawn have no weight, the drawn ones `rate`."""
    features, weight, targets = leaves()
    targets[:ignored] = -100
    torch.manual_seed(5)
    ours = sampled_cross_entropy(features, weight, targets, rate, 20)

    torch.manual_seed(5)
    times = rate * (torch.rand(97) < 1 / rate)
    times[targets[ignored:]] = 1
    if ignored:
        times[0] = 1  # in the place of ignored targets
    expected = F.cross_entropy(features @ weight.T + times.log(), targets)
    torch.testing.assert_close(ours, expected)
    inputs = [features, weight]
    torch.testing.assert_close(torch.autograd.grad(ours, inputs), torch.autograd.grad(expected, inputs))


@pytest.mark.parametrize(("steps", "accumulated", "sampled"), [(10, 1, 8), (4, 2, 6)])
def test_the_last_fifth_of_the_updates_scores_half_of_the_ids(
    steps, accumulated, sampled, workplace, monkeypatch
):
    rates = []

    def noted(features, weight, targets, rate, *more):
        rates.append(rate)
        return sampled_cross_entropy(features, weight, targets, rate, *more)

    monkeypatch.setattr(module, "sampled_cross_entropy", noted)
    data = TokenData("text.txt", vocab_size=300, context_length=16, batch_size=4)
    config = GPTConfig(vocab_size=300, context_length=16, emb_dim=16, num_heads=2, num_layers=1)
    trained = LanguageModel(config, sampled_softmax=5)
    trainer(max_steps=steps, accumulate_grad_batches=accumulated, limit_val_batches=0).fit(trained, data)
    with torch.no_grad():  # a validation scores all ids
        trained.eval().cross_entropy(next(iter(data.val_dataloader())))
    assert rates == [5] * sampled + [2] * (steps * accumulated - sampled)


@pytest.mark.parametrize("vocab_size", [1024, 2048, 4096])
@pytest.mark.parametrize("tokens", [1536, 6144])
def test_the_share_that_is_sampled_is_that_of_a_text(vocab_size, tokens):
    text = "".join(islice(python_docs(), 200))[: 1 << 20]
    ids = torch.from_numpy(learn([text], Learned(vocab_size)).encode_array(text).astype("int64"))
    starts = torch.randint(len(ids) - 64, (tokens // 64, 1))
    targets = ids[starts + torch.arange(64)].unique().numel()
    for rate in (2, 8):
        expected = (targets + (vocab_size - targets) / rate) / vocab_size
        assert sampled_share(vocab_size, tokens, rate) == pytest.approx(expected, abs=0.1)
    assert sampled_share(vocab_size, tokens, 1) == 1


def test_on_average_a_sample_has_the_whole_softmaxs_denominator():
    features, weight, targets = leaves()
    with torch.no_grad():
        logits = features[:1] @ weight.T
        losses = [sampled_cross_entropy(features[:1], weight, targets[:1], 4) for _ in range(3000)]
        denominators = torch.stack(losses).exp() * logits[0, targets[0]].exp()
    error = denominators.std() / len(losses) ** 0.5
    assert abs(denominators.mean() - logits.exp().sum()) < 4 * error < 0.1 * logits.exp().sum()
