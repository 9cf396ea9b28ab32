import torch

from gpt.attention import KeyValueCache, MultiHeadAttention


def test_updates_return_all_so_far_without_new_memory() -> None:
    cache = KeyValueCache(2, 3, 8, 4)
    memory = cache.keys.data_ptr()
    key, value = torch.randn(2, 2, 3, 5, 4).unbind()
    cache.update(key[:, :, :3], value[:, :, :3])
    keys, values = cache.update(key[:, :, 3:], value[:, :, 3:])
    assert torch.equal(keys, key) and torch.equal(values, value)
    assert cache.length == 5
    assert cache.keys.data_ptr() == memory == keys.data_ptr()


def test_a_part_of_several_tokens_continues_what_is_cached() -> None:
    module = MultiHeadAttention(6, 8, 16, 0.0, 2)
    x = torch.randn(2, 9, 6)
    cache = module.new_cache(2)
    parts = [module(part, cache=cache) for part in x.split([2, 4, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), module(x))
