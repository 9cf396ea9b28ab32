import torch

from gpt.attention import KeyValueCache


def test_updates_return_all_so_far_without_new_memory() -> None:
    cache = KeyValueCache(2, 3, 8, 4)
    memory = cache.keys.data_ptr()
    key, value = torch.randn(2, 2, 3, 5, 4).unbind()
    cache.update(key[:, :, :3], value[:, :, :3])
    keys, values = cache.update(key[:, :, 3:], value[:, :, 3:])
    assert torch.equal(keys, key) and torch.equal(values, value)
    assert cache.length == 5
    assert cache.keys.data_ptr() == memory == keys.data_ptr()
