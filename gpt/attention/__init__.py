"""The attention module inside the GPT, and the systems of the chapters that lead to it. Needs torch alone."""

from gpt.attention.cache import KeyValueCache
from gpt.attention.capture import capture_weights
from gpt.attention.convert import from_fused, from_torch, to_fused, to_torch
from gpt.attention.multi_head import MultiHeadAttention
from gpt.attention.steps import (
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
