"""The GPT: by default exactly GPT-2's architecture (Radford et al. 2019, section 2.3).

Shapes: B batch, T tokens, D emb_dim, V vocab_size.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt.attention import KeyValueCache, MultiHeadAttention
from gpt.attention.kernels import causal_mask
from gpt.config import GPTConfig
from gpt.errors import InputError, check_least


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, 4 * D wide inside: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.emb_dim, 4 * config.emb_dim)
        self.activation = nn.GELU(approximate="none" if config.exact_gelu else "tanh")
        self.down = nn.Linear(4 * config.emb_dim, config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token by itself: (B, T, D) -> (B, T, D)."""
        return self.down(self.activation(self.up(x)))


class WindowDropout(nn.Dropout1d):
    """Dropout with one mask for all tokens of a window: (B, T, D) -> (B, T, D).

    Only B * D random numbers are drawn. With a mask for each entry and each attention weight, dropout takes a
    third of a small model's step on a CPU (Gal and Ghahramani 2016, "A Theoretically Grounded Application of
    Dropout in Recurrent Neural Networks", section 4).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Drop each feature with probability `p` in a whole window; the others are scaled by 1 / (1 - p)."""
        return super().forward(input.mT).mT


def build_dropout(config: GPTConfig) -> nn.Module:
    """Return the dropout of the embeddings and of what the layers add to the residual stream."""
    return WindowDropout(config.dropout) if config.window_dropout else nn.Dropout(config.dropout)


class TransformerBlock(nn.Module):
    """Attention, then the feed-forward, each after a LayerNorm and inside a residual connection.

    All blocks of a model share the `mask` of `MultiHeadAttention`.
    """

    def __init__(self, config: GPTConfig, mask: Tensor | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.emb_dim)
        self.attention = MultiHeadAttention(
            d_in=config.emb_dim,
            d_out=config.emb_dim,
            context_length=config.context_length,
            dropout=0.0 if config.window_dropout else config.dropout,
            num_heads=config.num_heads,
            qkv_bias=config.qkv_bias,
            mask=mask,
        )
        self.feed_forward_norm = nn.LayerNorm(config.emb_dim)
        self.feed_forward = FeedForward(config)
        self.dropout = build_dropout(config)

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Compute (B, T, D) -> (B, T, D); masks and cache are those of `MultiHeadAttention.forward`."""
        attended = self.attention(
            self.attention_norm(x), key_padding_mask=key_padding_mask, attn_mask=attn_mask, cache=cache
        )
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """A decoder-only language model: token ids (B, T) -> logits of each next token (B, T, V)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = False  # recompute each block in the backward pass, to save memory
        self.token_embedding = nn.Embedding(config.vocab_size, config.emb_dim)
        self.position_embedding = nn.Embedding(config.context_length, config.emb_dim)
        self.dropout = build_dropout(config)
        mask = causal_mask(config.context_length)  # one for all blocks
        self.blocks = nn.ModuleList(TransformerBlock(config, mask) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.emb_dim)
        self.head = nn.Linear(config.emb_dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        self.register_load_state_dict_post_hook(_restore_shared_tensors)  # type: ignore[no-untyped-call]
        self._init_weights()

    def forward(
        self,
        tokens: Tensor,
        *,
        last: int | None = None,
        positions: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits: token ids (B, T) int64 -> (B, T, V), or (B, last, V) of the last tokens only.

        The other arguments are those of `features`. Raises InputError if `last` is below 1.
        """
        check_least(1, last=last)
        features = self.features(
            tokens,
            positions=positions,
            caches=caches,
            key_padding_mask=key_padding_mask,
            document_ids=document_ids,
        )
        return self.head(features if last is None else features[:, -last:])

    def features(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Run all but the head: token ids (B, T) int64 -> normalised features (B, T, D).

        Args:
            tokens: (B, T); with caches, the tokens that follow the S - T cached ones.
            positions: (T,) or (B, T) int64, each token's row of the position embedding; by default they count
                up from the first token given or cached. A batch padded on the left needs them.
            caches: one per block, see `MultiHeadAttention.new_cache`; the tokens are appended to each.
            key_padding_mask: (B, S) boolean, True for tokens that are padding.
            document_ids: (B, S) integers; a token attends only to tokens of its own document.

        Raises:
            InputError: tokens are not (B, T) integers, are more than the context length, or an id is outside
                the vocabulary. Ids are checked only on a CPU, as the check would wait for a GPU.
        """
        cached = caches[0].length if caches else 0
        self._check(tokens, cached)
        if positions is None:
            positions = torch.arange(cached, cached + tokens.shape[1], device=tokens.device)  # (T,)
        attn_mask = None
        if document_ids is not None:  # one mask for all blocks, (B, T, S)
            attn_mask = document_ids[:, cached:, None] != document_ids[:, None, :]
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))  # (B, T, D)
        per_block: Sequence[KeyValueCache | None] = caches or [None] * len(self.blocks)
        for block, cache in zip(self.blocks, per_block, strict=True):
            run = partial(block, cache=cache, key_padding_mask=key_padding_mask, attn_mask=attn_mask)
            recompute = self.checkpoint_activations and self.training
            x = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
        return self.final_norm(x)

    def num_parameters(self) -> int:
        """Return the number of weights; tied embeddings count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _check(self, tokens: Tensor, cached: int) -> None:
        if tokens.dim() != 2 or not tokens.numel() or tokens.dtype not in (torch.int64, torch.int32):
            given = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
            raise InputError(f"expected int64 token ids of shape (batch, tokens), at least one, got {given}")
        count = cached + tokens.shape[1]
        if count > self.config.context_length:
            raise InputError(f"{count} tokens are more than the context_length {self.config.context_length}")
        if tokens.device.type != "cpu" or torch.compiler.is_compiling():
            return
        try:
            low = int(tokens.min())
            high = int(tokens.max())
            size = self.config.vocab_size
        except RuntimeError:  # torch.vmap does not allow reading values
            return
        if not 0 <= low <= high < size:
            worst = low if low < 0 else high
            raise InputError(f"token id {worst} is outside the vocabulary of vocab_size {size}")

    def _init_weights(self) -> None:
        """Initialise as in GPT-2: variance does not grow with depth (Radford et al. 2019, section 2.3)."""
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writes_residual = name.endswith(("out_proj", "feed_forward.down"))
                nn.init.normal_(module.weight, std=residual_std if writes_residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def restore_shared_tensors(self) -> None:
        """Share one matrix between token embedding and head, if tied, and one new causal mask between blocks.

        It runs after each load of a state dict, because loading may replace tensors (`assign=True`), and
        tensors may have had no values before (`.to_empty`).
        """
        if self.config.tie_embeddings and isinstance(self.head, nn.Linear):
            self.head.weight = self.token_embedding.weight
        mask = causal_mask(self.config.context_length, self.token_embedding.weight.device)
        for module in self.modules():
            if isinstance(module, MultiHeadAttention) and module.mask is not None:
                module.mask = mask


def _restore_shared_tensors(module: nn.Module, _: object) -> None:
    assert isinstance(module, GPT)
    module.restore_shared_tensors()
