import copy
import math
import pickle

import pytest
import torch

from gpt import GPT, GPTConfig
from gpt import model as model_module
from gpt.attention import multi_head
from gpt.attention.kernels import causal_mask
from gpt.errors import InputError


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


def test_the_head_is_the_token_embedding(model):
    assert model.head.weight is model.token_embedding.weight
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert clone.head.weight is clone.token_embedding.weight
        assert clone.head.weight.data_ptr() != model.head.weight.data_ptr()


def test_initial_weights_have_gpt2s_deviations():
    model = GPT(GPTConfig(vocab_size=2000, context_length=64, emb_dim=256, num_heads=4, num_layers=8))
    block = model.blocks[3]
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.feed_forward.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
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


def test_dropout_acts_only_in_training(tokens, config):
    model = GPT(GPTConfig.from_dict({**config.to_dict(), "dropout": 0.5}))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_one_mask_a_model(model, config):
    with torch.device("meta"):
        empty = GPT(config)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    loaded = GPT(config)
    loaded.load_state_dict(model.state_dict(), assign=True)
    read = GPT.from_weights(config, model.state_dict())
    for one in (model, empty, loaded, read, copy.deepcopy(model), model.double().float()):
        assert len({block.attention.mask.data_ptr() for block in one.blocks}) == 1
        expected = torch.ones(16, 16, dtype=torch.bool).triu(diagonal=1)
        assert torch.equal(one.blocks[1].attention.mask, expected)
    assert not any("mask" in name for name in model.state_dict())
    assert {block.attention.mask.device.type for block in model.to("meta").blocks} == {"meta"}


def test_a_mask_is_made_once(config, monkeypatch):
    made = []
    for module in (model_module, multi_head):
        monkeypatch.setattr(module, "causal_mask", lambda *args: made.append(args) or causal_mask(*args))
    GPT(config)
    assert made == [(16,)]


def test_a_checkpoint_that_carries_masks_still_loads(model, config, tokens):
    """As the chapter's own modules save them."""
    mask = torch.ones(16, 16).triu(diagonal=1)
    saved = {**model.state_dict(), **{f"blocks.{i}.attention.mask": mask for i in range(config.num_layers)}}
    loaded = GPT(config).eval()
    loaded.load_state_dict(saved)
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.blocks[0].attention.mask.dtype == torch.bool


def test_too_many_tokens_are_refused(model):
    with pytest.raises(InputError, match=r"17 .*context_length 16"):
        model(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("bad", [300, -1])
def test_an_id_outside_the_vocabulary_is_refused(model, tokens, bad):
    tokens[1, :3] = torch.tensor([0, 1, bad])
    with pytest.raises(InputError, match=rf"{bad} .*vocab_size 300"):
        model(tokens)


@pytest.mark.parametrize("shape", [(), (16,), (1, 4, 4), (2, 0), (0, 4)])
def test_tokens_of_another_rank_and_no_tokens_are_refused(model, shape):
    with pytest.raises(InputError, match=r"at least one, got torch.int64 of shape \(" + str(shape)[1:-1]):
        model(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_tokens_of_another_type_are_refused(model, dtype):
    with pytest.raises(InputError, match=f"expected int64 token ids .* got {dtype} of shape"):
        model(torch.zeros((2, 4), dtype=dtype))


def test_tokens_may_be_int32(model, tokens):
    assert torch.equal(model(tokens.int()), model(tokens))


def test_tied_embeddings_stay_tied(model, config, tokens):
    expected, saved = model(tokens), {name: value.clone() for name, value in model.state_dict().items()}
    loaded, outer = GPT(config).eval(), torch.nn.ModuleDict({"model": GPT(config)}).eval()
    loaded.load_state_dict(saved, assign=True)
    outer.load_state_dict({f"model.{name}": value for name, value in saved.items()}, assign=True)
    with torch.device("meta"):
        empty = GPT(config).eval()
    empty.to_empty(device="cpu").load_state_dict(saved)
    for other in (loaded, outer["model"], empty, loaded.double().float()):
        assert other.head.weight is other.token_embedding.weight
        assert torch.equal(other(tokens), expected)


def test_weights_that_do_not_fit_are_named(model, config):
    weights = dict(model.state_dict())
    del weights["head.weight"]
    with pytest.raises(InputError, match=r"blocks\.1\.attention\.W_key\.weight.*\(32, 32\)"):
        GPT.from_weights(config, {k: v for k, v in weights.items() if k != "blocks.1.attention.W_key.weight"})
    with pytest.raises(InputError, match=r"final_norm\.bias has shape \(31,\), expected \(32,\)"):
        GPT.from_weights(config, {**weights, "final_norm.bias": torch.zeros(31)})
    with pytest.raises(InputError, match="extra"):
        GPT.from_weights(config, {**weights, "extra": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"Unexpected .*extra"):
        model.load_state_dict({**model.state_dict(), "extra": torch.zeros(1)})


def test_attention_stays_within_documents_by_one_mask_for_all_blocks():
    model = GPT(GPTConfig(vocab_size=40, context_length=8, emb_dim=8, num_heads=2, num_layers=3)).eval()
    made = set()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args, given: made.add(given["attn_mask"]), with_kwargs=True)
    tokens = torch.randint(0, 40, (1, 8))
    found = model(tokens, document_ids=torch.tensor([[0] * 5 + [1] * 3]))
    assert len(made) == 1
    positions = torch.arange(5, 8)
    torch.testing.assert_close(found[:, 5:], model(tokens[:, 5:], positions=positions))
    torch.testing.assert_close(found[:, :5], model(tokens[:, :5]))
