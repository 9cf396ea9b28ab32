import pytest
import torch
from torch import nn

from gpt import GPT, GPTConfig
from gpt.errors import InputError
from gpt.generation import decoding, for_decoding
from gpt.generation.decoding import Int8Linear, PackedLinear

SIZES = [(64, 64), (96, 256), (304, 33), (64, 768)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_layer(dtype, bias):
    linear = nn.Linear(64, 48, bias=bias)
    layer = PackedLinear(linear, dtype)
    for shape in ((1, 1, 64), (3, 1, 64), (2, 5, 64), (7, 64)):
        x = torch.randn(shape)
        expected = linear.to(dtype)(x.to(dtype)).float()
        given = layer(x)
        assert given.dtype == x.dtype
        torch.testing.assert_close(given, expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


@pytest.fixture
def no_bfloat16(monkeypatch):
    """A processor without bfloat16 kernels, whatever this one has."""
    monkeypatch.setattr(decoding, "can_pack", lambda dtype: dtype == torch.float32)


@pytest.mark.usefixtures("no_bfloat16")
def test_bfloat16_weights_without_a_kernel_are_rounded_and_computed_in_float32():
    linear = nn.Linear(64, 48)
    layer = PackedLinear(linear, torch.bfloat16)
    x = torch.randn(5, 64)
    rounded = x @ linear.weight.bfloat16().float().T + linear.bias.bfloat16().float()
    assert layer.packed.dtype == torch.float32
    torch.testing.assert_close(layer(x), rounded, atol=1e-5, rtol=0)
    for row in range(5):
        assert torch.equal(layer(x[row : row + 1]), layer(x)[row : row + 1])


@pytest.mark.usefixtures("no_bfloat16")
def test_a_bfloat16_model_without_a_kernel_is_packed_in_float32(model):
    fast = for_decoding(model.bfloat16())
    assert isinstance(fast.head, PackedLinear) and fast.head.packed.dtype == torch.float32
    tokens = torch.randint(0, 300, (2, 16))
    torch.testing.assert_close(fast(tokens), model.float()(tokens), atol=1e-3, rtol=1e-4)


def test_the_probe_agrees_with_the_kernel():
    linear = nn.Linear(32, 32)
    assert decoding.can_pack(torch.float32)
    assert not decoding.can_pack(torch.float64)
    if decoding.can_pack(torch.bfloat16):
        assert PackedLinear(linear, torch.bfloat16).packed.dtype == torch.bfloat16
    else:
        with pytest.raises(RuntimeError):
            torch.ops.mkldnn._reorder_linear_weight(linear.weight.bfloat16(), 2)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("inside", "outside"), SIZES)
def test_a_row_is_the_same_bit_for_bit_in_any_company(kind, inside, outside):
    linear = nn.Linear(inside, outside)
    layer = Int8Linear(linear) if kind == "int8" else PackedLinear(linear, getattr(torch, kind))
    x = torch.randn(33, inside)
    with torch.inference_mode():
        together = layer(x)
        for count in (1, 2, 3, 8, 16):
            for first in range(0, 33 - count, 5):
                assert torch.equal(layer(x[first : first + count]), together[first : first + count])


def test_int8_weights_are_within_half_a_step():
    linear = nn.Linear(64, 48)
    layer = Int8Linear(linear)
    restored = layer.weight.float() * layer.scale.float()[:, None]
    # Rounding the scale down to bfloat16 can put the largest weight of a row past the last step.
    slack = linear.weight.abs().amax(dim=1, keepdim=True) * 2**-8
    assert ((restored - linear.weight).abs() <= layer.scale.float()[:, None] / 2 + slack).all()
    x = torch.randn(5, 64)
    exact = x.bfloat16().float() @ restored.T + linear.bias
    torch.testing.assert_close(layer(x), exact, atol=2e-2, rtol=1e-2)


def test_weights_that_are_stored_transposed():
    """As those of transformers and nanoGPT come out of their files."""
    linear = nn.Linear(32, 48)
    x, expected = torch.randn(5, 32), Int8Linear(linear)
    linear.weight = nn.Parameter(linear.weight.detach().T.contiguous().T)
    assert torch.equal(Int8Linear(linear)(x), expected(x))


def test_a_row_of_zeros_stays_zero():
    linear = nn.Linear(32, 4, bias=False)
    with torch.no_grad():
        linear.weight[1] = 0
    assert (Int8Linear(linear)(torch.randn(2, 32))[:, 1] == 0).all()


@pytest.mark.parametrize(
    ("precision", "error"), [(None, 1e-5), ("float32", 1e-5), ("bfloat16", 0.1), ("int8", 0.1)]
)
def test_the_copy_computes_what_the_model_computes(precision, error):
    model = GPT(GPTConfig(vocab_size=300, context_length=16, emb_dim=64, num_heads=4, num_layers=2))
    tokens = torch.randint(0, 300, (2, 16))
    fast = for_decoding(model, precision)
    expected, given = model.eval()(tokens), fast(tokens)
    assert given.dtype == torch.float32
    assert (given - expected).abs().max() < error * expected.abs().max()
    assert not torch.equal(given, expected) or precision in (None, "float32")


def test_the_model_is_left_as_it_was(model):
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for precision in (None, "float32", "bfloat16", "int8"):
        fast = for_decoding(model, precision)
        assert not fast.training
        assert for_decoding(fast) is fast
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {type(m) for m in model.modules()} & {PackedLinear, Int8Linear} == set()


def test_a_bfloat16_model_keeps_its_weights(model):
    fast = for_decoding(model.bfloat16())
    assert fast.head.packed.dtype == (torch.bfloat16 if decoding.can_pack(torch.bfloat16) else torch.float32)
    assert fast.token_embedding.weight.dtype == torch.float32  # activations are float32
    assert model.token_embedding.weight.dtype == torch.bfloat16


def test_other_types_have_plain_layers(model):
    fast = for_decoding(model.double())
    assert isinstance(fast.head, nn.Linear)
    assert fast.head.weight.data_ptr() == model.head.weight.data_ptr()


def test_without_onednn_layers_are_plain(model, monkeypatch):
    monkeypatch.setattr(decoding, "can_pack", lambda dtype: False)
    fast = for_decoding(model, "bfloat16")
    assert isinstance(fast.head, nn.Linear) and fast.head.weight.dtype == torch.bfloat16
    assert model.head.weight.dtype == torch.float32


def test_int8_where_its_kernel_cannot_be_used():
    model = GPT(GPTConfig(vocab_size=300, context_length=16, emb_dim=36, num_heads=2, num_layers=1)).eval()
    tokens = torch.randint(0, 300, (2, 16))
    torch.testing.assert_close(for_decoding(model, "int8")(tokens), model(tokens), atol=2e-2, rtol=0)
    with pytest.raises(InputError, match=r"36 .*divisible by 16"):
        Int8Linear(model.head)


def test_what_cannot_be_is_refused(model):
    with pytest.raises(InputError, match="int4"):
        for_decoding(model, "int4")
    with pytest.raises(InputError, match="int8 is for a CPU"):
        for_decoding(model.to("meta"), "int8")
