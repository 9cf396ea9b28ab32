import json

import numpy as np
import pytest

from gpt import GPTConfig
from gpt.errors import InputError

REFUSED = {
    "heads that do not divide the width": ({"emb_dim": 130, "num_heads": 4}, "130 .*4"),
    "no tokens": ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
    "a size beyond reason": ({"emb_dim": 10**10}, "emb_dim must be at most .*, got 10000000000$"),
    "layers beyond reason": ({"num_layers": 10_001}, "num_layers must be at most 10000, got 10001"),
    "a fraction for a size": ({"vocab_size": 12.0}, "vocab_size must be a whole number, got 12.0"),
    "true for a size": ({"vocab_size": True}, "vocab_size must be a whole number"),
    "a long text": ({"vocab_size": "x" * 10_000}, "vocab_size must be a whole number"),
    "two lines": ({"vocab_size": "two\nlines"}, "vocab_size must be a whole number"),
    "text for a number": ({"dropout": "0.1"}, "dropout must be a number"),
    "a number for true": ({"qkv_bias": 1}, "qkv_bias must be true or false, got 1"),
    "a negative dropout": ({"dropout": -0.1}, r"dropout must be in \[0, 1\)"),
    "dropout of all": ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
    "dropout that is no number": ({"dropout": float("nan")}, r"dropout must be in \[0, 1\)"),
    "unknown settings": ({"n_embd": 3, 3: 3}, "unknown model setting 3, n_embd, expected vocab_size"),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_shape_is_refused_in_one_short_line(values, message):
    with pytest.raises(InputError, match=message) as error:
        GPTConfig.from_dict(values)
    assert "\n" not in str(error.value) and len(str(error.value)) < 250


def test_numbers_of_numpy_become_plain():
    values = {"emb_dim": np.int64(64), "num_heads": 2, "dropout": np.float32(0.5)}
    config = GPTConfig(**values)
    assert json.loads(json.dumps(config.to_dict()))["emb_dim"] == 64
    assert (type(config.emb_dim), type(config.dropout)) == (int, float)


def test_a_named_size_with_changes_goes_to_a_dict_and_back():
    config = GPTConfig.from_name("gpt2-xl", context_length=256, dropout=0)  # JSON writes 0.0 as 0
    assert (config.emb_dim, config.num_heads, config.num_layers, config.context_length) == (1600, 25, 48, 256)
    assert GPTConfig.from_dict(config.to_dict()) == config
    with pytest.raises(InputError, match="gpt2-medium"):
        GPTConfig.from_name("gpt3")
