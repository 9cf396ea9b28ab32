import pytest

from gpt import GPTConfig
from gpt.errors import InputError

SIZES = ["vocab_size", "context_length", "emb_dim", "num_heads", "num_layers"]


def test_heads_must_divide_the_width():
    with pytest.raises(InputError, match=r"130 .*4"):
        GPTConfig(emb_dim=130, num_heads=4)


@pytest.mark.parametrize("field", SIZES)
def test_sizes_are_positive_and_within_reason(field):
    for size, message in ((0, "at least 1, got 0"), (10**10, "at most .*, got 10000000000$")):
        with pytest.raises(InputError, match=f"{field} must be {message}"):
            GPTConfig(**{field: size})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 12.0),
        ("vocab_size", True),
        ("vocab_size", "x" * 10_000),
        ("vocab_size", "two\nlines"),
        ("dropout", "0.1"),
        ("qkv_bias", 1),
        ("tie_embeddings", "no"),
    ],
)
def test_another_type_is_refused_in_one_short_line(field, value):
    expected = f"^{field} must be (a whole number|a number|true or false), got "
    with pytest.raises(InputError, match=expected) as error:
        GPTConfig.from_dict({field: value})
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan"), float("inf")])
def test_dropout_is_a_probability_below_one(dropout):
    with pytest.raises(InputError, match="dropout"):
        GPTConfig(dropout=dropout)
    assert GPTConfig(dropout=0).dropout == 0  # YAML and JSON write 0.0 as 0


def test_a_named_size_with_a_change_to_dict_and_back():
    config = GPTConfig.from_name("gpt2-xl", context_length=256)
    assert (config.emb_dim, config.num_heads, config.num_layers, config.context_length) == (1600, 25, 48, 256)
    assert GPTConfig.from_dict(config.to_dict()) == config


def test_unknown_names_list_the_known_ones():
    with pytest.raises(InputError, match="gpt2-medium"):
        GPTConfig.from_name("gpt3")
    with pytest.raises(InputError, match="unknown model setting 3, n_embd, expected vocab_size"):
        GPTConfig.from_dict({"n_embd": 3, 3: 3})
