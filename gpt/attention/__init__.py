"""The attention module inside the GPT, and the systems of the chapters that lead to it.

It needs torch alone, and its imports are relative: docs/attention.md tells how to copy it.
"""

from .cache import KeyValueCache
from .capture import capture_weights
from .convert import from_fused, from_torch, to_fused, to_torch
from .multi_head import MultiHeadAttention
from .steps import (
    CausalAttention,
    MultiHeadAttentionWrapper,
    MultiHeadAttn,
    SelfAttention_v1,
    SelfAttention_v2,
    attention_scores,
    attention_scores_by_loop,
    context_vectors,
    mask_by_infinity,
    mask_by_renormalising,
    normalise_by_sum,
    scores_of_heads,
    softmax_naive,
)

__all__ = [
    "CausalAttention",
    "KeyValueCache",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "MultiHeadAttn",
    "SelfAttention_v1",
    "SelfAttention_v2",
    "attention_scores",
    "attention_scores_by_loop",
    "capture_weights",
    "context_vectors",
    "from_fused",
    "from_torch",
    "mask_by_infinity",
    "mask_by_renormalising",
    "normalise_by_sum",
    "scores_of_heads",
    "softmax_naive",
    "to_fused",
    "to_torch",
]
