"""Beside the plain loss, and what a run does with it."""

from pydoc_data.topics import topics

import pytest
import torch
from tiny_runs import trainer
from torch.nn import functional as F

from gpt.config import GPTConfig
from gpt.data.module import TokenData
from gpt.data.windows import IGNORE_INDEX
from gpt.text.vocabulary import VocabularyToLearn, learn
from gpt.training import module
from gpt.training.module import LanguageModel
from gpt.training.sampled import sampled_cross_entropy, sampled_share


@pytest.mark.parametrize("ignored", [0, 3])
def test_a_sample_has_the_targets_and_others_that_count_for_those_left_out(ignored):
    """Beside the plain loss over all ids: others that are not drawn have no weight, the drawn ones four."""
    features, weight = torch.randn(50, 16, requires_grad=True), torch.randn(97, 16, requires_grad=True)
    targets = torch.randint(0, 97, (50,))
    targets[:ignored] = IGNORE_INDEX
    torch.manual_seed(5)
    ours = sampled_cross_entropy(features, weight, targets, one_in=4, chunk=20)

    torch.manual_seed(5)
    times = 4.0 * (torch.rand(97) < 1 / 4)
    times[targets[ignored:]] = 1
    if ignored:
        times[0] = 1  # in the place of ignored targets
    expected = F.cross_entropy(features @ weight.T + times.log(), targets)
    torch.testing.assert_close(ours, expected)
    inputs = [features, weight]
    torch.testing.assert_close(torch.autograd.grad(ours, inputs), torch.autograd.grad(expected, inputs))


def test_the_last_fifth_of_the_updates_scores_half_of_the_ids(workplace, monkeypatch):
    """There are four updates of two batches each."""
    drawn = []

    def noted(features, weight, targets, one_in, *more):
        drawn.append(one_in)
        return sampled_cross_entropy(features, weight, targets, one_in, *more)

    monkeypatch.setattr(module, "sampled_cross_entropy", noted)
    data = TokenData("text.txt", vocab_size=300, context_length=16, batch_size=4)
    config = GPTConfig(vocab_size=300, context_length=16, emb_dim=16, num_heads=2, num_layers=1)
    trained = LanguageModel(config, sampled_softmax=5)
    trainer(max_steps=4, accumulate_grad_batches=2, limit_val_batches=0).fit(trained, data)
    with torch.no_grad():  # a validation scores all ids
        trained.eval().cross_entropy(next(iter(data.val_dataloader())))
    assert drawn == [5] * 6 + [2] * 2


@pytest.mark.parametrize(("vocab_size", "tokens"), [(1024, 6144), (4096, 1536)])
def test_the_share_that_is_sampled_is_that_of_a_text(vocab_size, tokens):
    text = "".join(topics.values())
    ids = torch.from_numpy(learn([text], VocabularyToLearn(vocab_size)).encode_array(text).astype("int64"))
    starts = torch.randint(len(ids) - 64, (tokens // 64, 1))
    targets = ids[starts + torch.arange(64)].unique().numel()
    for one_in in (2, 8):
        expected = (targets + (vocab_size - targets) / one_in) / vocab_size
        assert sampled_share(vocab_size, tokens, one_in) == pytest.approx(expected, abs=0.1)
    assert sampled_share(vocab_size, tokens, 1) == 1
