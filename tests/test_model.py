import math
import pickle
from dataclasses import replace

import pytest
import torch

from gpt import GPT, GPTConfig
from gpt.errors import InputError
from gpt.model import WindowDropout


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_parameter_counts_of_the_named_sizes(name, count):
    with torch.device("meta"):
        model = GPT(GPTConfig.from_name(name))
    assert model.num_parameters() == count


def test_initial_weights_have_gpt2s_deviations():
    model = GPT(GPTConfig(vocab_size=2000, context_length=64, emb_dim=256, num_heads=4, num_layers=8))
    block = model.blocks[3]
    for weight in (model.token_embedding.weight, block.feed_forward.up.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (block.attention.out_proj.weight, block.feed_forward.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert all(not bias.any() for name, bias in model.named_parameters() if name.endswith("bias"))


def test_a_future_token_changes_no_earlier_logit(model, tokens):
    before = model(tokens)
    for position in range(1, tokens.shape[1]):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % model.config.vocab_size
        after = model(changed)
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.allclose(after[:, position], before[:, position])


@pytest.mark.parametrize("by_window", [False, True])
def test_dropout_acts_only_in_training(by_window, tokens, config):
    model = GPT(replace(config, dropout=0.5, window_dropout=by_window))
    assert {block.attention.dropout.p for block in model.blocks} == {0.0 if by_window else 0.5}
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_window_dropout_drops_a_feature_of_all_tokens_of_a_window():
    dropped = WindowDropout(0.25)(torch.ones(64, 5, 32))
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert sorted(set(dropped.unique().tolist())) == [0.0, pytest.approx(4 / 3)]
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


def from_meta(model: GPT) -> GPT:
    with torch.device("meta"):
        empty = GPT(model.config)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    return empty


def assigned_below(model: GPT) -> GPT:
    outer = torch.nn.ModuleDict({"model": GPT(model.config)})
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    outer.load_state_dict(weights, assign=True)
    return outer["model"]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model: pickle.loads(pickle.dumps(model)), id="pickled"),
        pytest.param(from_meta, id="from the meta device"),
        pytest.param(assigned_below, id="assigned within another module"),
    ],
)
def test_a_model_has_one_mask_and_a_tied_head_however_it_is_made(make, model, tokens):
    made = make(model).eval()
    assert torch.equal(made(tokens), model(tokens))
    assert made.head.weight is made.token_embedding.weight
    masks = [block.attention.mask for block in made.blocks]
    assert len({mask.data_ptr() for mask in masks}) == 1
    assert torch.equal(masks[1], torch.ones(16, 16, dtype=torch.bool).triu(diagonal=1))
    assert not any("mask" in name for name in made.state_dict())


REFUSED = {
    "too many": (torch.zeros(1, 17).long(), r"17 .*context_length 16"),
    "an id too large": (torch.tensor([[0, 1, 300]]), "300 .*vocab_size 300"),
    "an id below zero": (torch.tensor([[0, 1, -1]]), "-1 .*vocab_size 300"),
    "one dimension": (torch.zeros(16).long(), r"at least one, got torch.int64 of shape \(16,"),
    "no tokens": (torch.zeros(2, 0).long(), r"at least one, got torch.int64 of shape \(2, 0"),
    "numbers": (torch.zeros(2, 4), "expected int64 token ids .* got torch.float32 of shape"),
}


@pytest.mark.parametrize(("tokens", "message"), REFUSED.values(), ids=REFUSED)
def test_what_are_no_tokens_is_refused(tokens, message, model):
    with pytest.raises(InputError, match=message):
        model(tokens)


def test_the_last_logits_alone_are_at_least_one(model, tokens):
    torch.testing.assert_close(model(tokens, last=2), model(tokens)[:, -2:])
    with pytest.raises(InputError, match="last must be at least 1, got 0"):
        model(tokens, last=0)


def test_int32_tokens_are_tokens(model):
    assert torch.equal(model(torch.tensor([[1, 2]]).int()), model(torch.tensor([[1, 2]])))


def test_attention_stays_within_documents_by_one_mask_for_all_blocks():
    model = GPT(GPTConfig(vocab_size=40, context_length=8, emb_dim=8, num_heads=2, num_layers=3)).eval()
    masks = set()
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda _, args, given: masks.add(given["attn_mask"]), with_kwargs=True
        )
    tokens = torch.randint(0, 40, (1, 8))
    logits = model(tokens, document_ids=torch.tensor([[0] * 5 + [1] * 3]))
    assert len(masks) == 1
    torch.testing.assert_close(logits[:, 5:], model(tokens[:, 5:], positions=torch.arange(5, 8)))
    torch.testing.assert_close(logits[:, :5], model(tokens[:, :5]))


def test_a_text_that_is_read_in_pieces_with_caches_has_the_same_logits(model, tokens):
    caches = [block.attention.new_cache(len(tokens)) for block in model.blocks]
    with torch.no_grad():
        pieces = [model(piece, caches=caches) for piece in tokens.split([7, 1, 1, 4, 3], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens), atol=1e-4, rtol=0)
