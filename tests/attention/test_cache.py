import pytest
import torch

from gpt.attention import KeyValueCache, MultiHeadAttention
from gpt.errors import InputError


def test_updates_return_all_so_far_without_new_memory() -> None:
    cache = KeyValueCache(2, 3, 8, 4)
    memory = cache.keys.data_ptr()
    key, value = torch.randn(2, 2, 3, 5, 4).unbind()
    cache.update(key[:, :, :3], value[:, :, :3])
    keys, values = cache.update(key[:, :, 3:], value[:, :, 3:])
    assert torch.equal(keys, key) and torch.equal(values, value)
    assert cache.length == 5
    assert cache.keys.data_ptr() == memory == keys.data_ptr()


def test_ragged_prompts_padded_on_the_left_decode_as_each_alone() -> None:
    module, lengths, longest, new = MultiHeadAttention(6, 8, 16, 0.0, 2), [2, 5, 4], 5, 4
    rows = [torch.randn(1, length + new, 6) for length in lengths]
    alone = [module(row) for row in rows]
    x = torch.zeros(len(rows), longest + new, 6)
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        x[i, longest - length :] = row
        padding[i, : longest - length] = True
    cache = module.new_cache(len(rows), max_length=longest + new)
    with torch.inference_mode():
        pieces = [module(x[:, :longest], cache=cache, key_padding_mask=padding[:, :longest])]
        for t in range(longest, longest + new):
            pieces.append(module(x[:, t : t + 1], cache=cache, key_padding_mask=padding[:, : t + 1]))
    out = torch.cat(pieces, dim=1)
    for i, length in enumerate(lengths):
        torch.testing.assert_close(out[i : i + 1, longest - length :], alone[i])
        assert (out[i, : longest - length] == 0).all()


def test_bad_shapes() -> None:
    cache = KeyValueCache(2, 3, 8, 4)
    with pytest.raises(InputError, match=r"keys of shape \(2, 3, T, 4\), got \(1, 3, 5, 4\)"):
        cache.update(torch.zeros(1, 3, 5, 4), torch.zeros(1, 3, 5, 4))
    with pytest.raises(InputError, match="holds 0 of at most 8 tokens, 9 more do not fit"):
        cache.update(torch.zeros(2, 3, 9, 4), torch.zeros(2, 3, 9, 4))
    assert cache.length == 0
