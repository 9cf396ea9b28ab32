"""The GPT's attention module, and the book's simpler variants that lead up to it. They need only torch and
`gpt/errors.py`."""

from .cache import KeyValueCache as KeyValueCache
from .capture import capture_weights as capture_weights
from .multi_head import MultiHeadAttention as MultiHeadAttention
from .steps import CausalAttention as CausalAttention
from .steps import MultiHeadAttentionWrapper as MultiHeadAttentionWrapper
from .steps import MultiHeadAttn as MultiHeadAttn
from .steps import SelfAttention_v1 as SelfAttention_v1
from .steps import SelfAttention_v2 as SelfAttention_v2
from .steps import attention_scores as attention_scores
from .steps import attention_scores_by_loop as attention_scores_by_loop
from .steps import context_vectors as context_vectors
from .steps import mask_by_infinity as mask_by_infinity
from .steps import mask_by_renormalising as mask_by_renormalising
from .steps import normalise_by_sum as normalise_by_sum
from .steps import scores_of_heads as scores_of_heads
from .steps import softmax_naive as softmax_naive
