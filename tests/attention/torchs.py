"""The module with the weights of a `torch.nn.MultiheadAttention`, the reference of several tests."""

from torch import nn

from gpt.attention import MultiHeadAttention

PARTS = ("W_query", "W_key", "W_value")


def from_torch(theirs: nn.MultiheadAttention, context_length: int, causal: bool = True) -> MultiHeadAttention:
    width, bias = theirs.embed_dim, theirs.in_proj_bias
    ours = MultiHeadAttention(
        width,
        width,
        context_length,
        theirs.dropout,
        theirs.num_heads,
        qkv_bias=bias is not None,
        causal=causal,
    )
    state = {"out_proj.bias": ours.out_proj.bias.new_zeros(width)}  # theirs may have none
    state |= {f"out_proj.{name}": tensor for name, tensor in theirs.out_proj.state_dict().items()}
    for kind, fused in (("weight", theirs.in_proj_weight), ("bias", bias)):
        if fused is not None:
            state |= {f"{part}.{kind}": rows for part, rows in zip(PARTS, fused.chunk(3), strict=True)}
    ours.to(theirs.in_proj_weight).load_state_dict(state)
    return ours
