import pytest
import torch

from gpt.attention import MultiHeadAttention
from gpt.errors import InputError


def test_a_cache_keeps_its_memory_and_bad_input_leaves_it_unchanged() -> None:
    module = MultiHeadAttention(5, 12, 8, 0.0, 3)
    x, cache = torch.randn(2, 6, 5), module.new_cache(2)
    memory = cache.keys.data_ptr()
    module(x, cache=cache)
    keys = cache.keys.clone()

    with pytest.raises(InputError, match=r"\(1, 7\) or .*, got torch.bool"):
        module(x[:, :1], cache=cache, attn_mask=torch.zeros(1, 1).bool())
    with pytest.raises(InputError, match="holds 6 of at most 8 tokens, 3 more do not fit"):
        module(x[:, :3], cache=cache)

    assert cache.length == 6
    assert torch.equal(cache.keys, keys)
    assert cache.keys.data_ptr() == memory


def test_without_a_causal_mask_there_is_no_cache() -> None:
    with pytest.raises(InputError, match="a cache needs causal=True"):
        MultiHeadAttention(5, 12, 8, 0.0, 3, causal=False).new_cache(2)
