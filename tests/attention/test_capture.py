import torch
from torch import Tensor, nn

from gpt.attention import MultiHeadAttention, capture_weights

X = torch.randn(2, 3, 8)


class Asking(nn.Module):
    """A model that itself asks for the weights of one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = MultiHeadAttention(8, 8, 4, 0.0, num_heads=2)
        self.other = MultiHeadAttention(8, 8, 4, 0.0, num_heads=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = self.asked(x, need_weights=True)
        return self.other(out), weights


def test_a_model_that_asks_for_weights_itself_gets_them():
    model = Asking().eval()
    expected, weights = model(X)
    with capture_weights(model) as captured:
        out, given = model(X)
    assert torch.allclose(out, expected, atol=1e-6) and torch.equal(given, weights)
    assert captured.keys() == {"asked", "other"} and torch.equal(captured["asked"], weights)


def test_two_captures_at_a_time():
    model = Asking().eval()
    with capture_weights(model) as outer, capture_weights(model) as inner:
        model(X)
    for name in ("asked", "other"):
        assert torch.equal(outer[name], inner[name])
    assert isinstance(model.other(X), Tensor)  # the hooks are gone
