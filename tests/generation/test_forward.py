"""Generation leaves PyTorch's switches as it finds them: training computes after a sample as before it."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from gpt.generation.forward import Forward


def test_cudnn_attention_is_left_out_until_the_last_of_two_threads_has_ended(model, monkeypatch):
    """The first to enter is the first to leave, while the other still computes."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)  # all compute on the CPU
    assert torch.backends.cuda.cudnn_sdp_enabled()
    both_inside, first_has_left = Barrier(2), Barrier(2)
    forward = Forward(model, cached=False)
    still_out = []

    def hook(module, arguments, output):
        both_inside.wait(timeout=30)
        if len(arguments[0]) == 2:  # the second thread's batch
            first_has_left.wait(timeout=30)
            still_out.append(not torch.backends.cuda.cudnn_sdp_enabled())

    def first():
        forward.logits(torch.ones(1, 3, dtype=torch.int64), 1)
        first_has_left.wait(timeout=30)

    model.register_forward_hook(hook)
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(first), pool.submit(forward.logits, torch.ones(2, 3, dtype=torch.int64), 1)]
        for result in ended:
            result.result()
    assert still_out == [True]
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_attention_is_left_out_only_while_the_model_computes(before, model, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)  # it computes on the CPU
    seen = []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    torch.backends.cuda.enable_cudnn_sdp(before)
    try:
        Forward(model, cached=False).logits(torch.ones(1, 3, dtype=torch.int64), 1)
        assert (seen, torch.backends.cuda.cudnn_sdp_enabled()) == ([False], before)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
