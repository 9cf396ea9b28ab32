import pytest

from gpt import GPTConfig
from gpt.errors import InputError


def test_heads_must_divide_the_width():
    with pytest.raises(InputError, match=r"130 .*4"):
        GPTConfig(emb_dim=130, num_heads=4)


@pytest.mark.parametrize("field", ["vocab_size", "context_length", "emb_dim", "num_heads", "num_layers"])
def test_sizes_are_positive(field):
    with pytest.raises(InputError, match=f"{field} must be at least 1, got 0"):
        GPTConfig(**{field: 0})


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_dropout_is_a_probability_below_one(dropout):
    with pytest.raises(InputError, match="dropout"):
        GPTConfig(dropout=dropout)


def test_a_named_size_with_a_change():
    config = GPTConfig.from_name("gpt2-xl", context_length=256)
    assert (config.emb_dim, config.num_heads, config.num_layers, config.context_length) == (1600, 25, 48, 256)


def test_unknown_names_say_which_are_known():
    with pytest.raises(InputError, match="gpt2-medium"):
        GPTConfig.from_name("gpt3")
    with pytest.raises(InputError, match="unknown model setting n_embd, expected vocab_size"):
        GPTConfig.from_dict({"n_embd": 3})


def test_fields_may_have_their_old_names():
    assert GPTConfig.from_dict({"tied_head": False}) == GPTConfig(tie_embeddings=False)


def test_there_and_back():
    config = GPTConfig.from_name("gpt2-small", dropout=0.25)
    assert GPTConfig.from_dict(config.to_dict()) == config
