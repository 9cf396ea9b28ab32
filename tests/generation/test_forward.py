"""Generation leaves PyTorch's switches as it finds them: training computes after a sample as before it."""

import pytest
import torch

from gpt.generation.forward import Forward


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
