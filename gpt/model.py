"""The GPT: token and position embeddings, pre-norm transformer blocks, a tied head.

The architecture is GPT-2's, exactly (Radford et al. 2019, section 2.3): LayerNorm before each sub-block, one
more after the last, learned positions, a tanh-approximated GELU, and a head that is the token embedding.

Shapes: B batch, T tokens, D emb_dim, V vocab_size.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self

from gpt.attention import KeyValueCache, MultiHeadAttention
from gpt.config import GPTConfig
from gpt.errors import InputError


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them, four times as wide inside: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.emb_dim, 4 * config.emb_dim)
        self.activation = nn.GELU(approximate="none" if config.exact_gelu else "tanh")
        self.down = nn.Linear(4 * config.emb_dim, config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.down(self.activation(self.up(x)))


class TransformerBlock(nn.Module):
    """Attention, then the feed-forward, each normalised before and added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.emb_dim)
        self.attention = MultiHeadAttention(
            d_in=config.emb_dim,
            d_out=config.emb_dim,
            context_length=config.context_length,
            dropout=config.dropout,
            num_heads=config.num_heads,
            qkv_bias=config.qkv_bias,
        )
        self.feed_forward_norm = nn.LayerNorm(config.emb_dim)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); the masks and the cache are those of `MultiHeadAttention`."""
        attended = self.attention(
            self.attention_norm(x), key_padding_mask=key_padding_mask, document_ids=document_ids, cache=cache
        )
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """A decoder-only language model: token ids (B, T) -> logits of each next token (B, T, V).

    Weights start as GPT-2's do: normal with deviation 0.02, biases zero, and the two projections that write
    into the residual stream of each block divided by sqrt(2 * num_layers), so that its variance does not grow
    with depth (Radford et al. 2019, section 2.3).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = False  # compute each block again in the backward pass, for memory
        self.token_embedding = nn.Embedding(config.vocab_size, config.emb_dim)
        self.position_embedding = nn.Embedding(config.context_length, config.emb_dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.emb_dim)
        self.head = nn.Linear(config.emb_dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        self._share_mask()
        self._init_weights()

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """Token ids (B, T) int64 -> logits (B, T, V).

        Args:
            tokens: (B, T); with caches, those that follow the S - T cached ones.
            positions: (T,) or (B, T) int64, each token's row of the position embedding; by default they count
                up from the first token given or cached. A batch padded on the left needs them.
            key_padding_mask: (B, S) boolean, True where a token, cached or given, is padding.
            document_ids: (B, S) integers; a token looks at those of its own document only.
            caches: one a block, see `MultiHeadAttention.new_cache`; the tokens are appended to each.

        Raises:
            InputError: `tokens` is not (B, T), T is over the context length, or an id is outside the
                vocabulary (not looked at on a GPU in training, where a look would stall every step).
        """
        features = self.features(
            tokens,
            positions=positions,
            key_padding_mask=key_padding_mask,
            document_ids=document_ids,
            caches=caches,
        )
        return self.head(features)

    def features(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """All of `forward` but the head: token ids (B, T) int64 -> normalised features (B, T, D)."""
        cached = caches[0].length if caches else 0
        self._check(tokens, cached)
        if positions is None:
            positions = torch.arange(cached, cached + tokens.shape[1], device=tokens.device)  # (T,)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, D)
        x = self.dropout(x)
        of_blocks: Sequence[KeyValueCache | None] = caches or [None] * len(self.blocks)
        for block, cache in zip(self.blocks, of_blocks, strict=True):
            run = partial(block, key_padding_mask=key_padding_mask, document_ids=document_ids, cache=cache)
            if self.checkpoint_activations and self.training:
                x = checkpoint(run, x, use_reentrant=False)
            else:
                x = run(x)
        return self.final_norm(x)

    def num_parameters(self) -> int:
        """How many weights there are, the tied head counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _check(self, tokens: Tensor, cached: int) -> None:
        if tokens.dim() != 2:
            raise InputError(f"expected token ids of shape (batch, tokens), got {tuple(tokens.shape)}")
        if cached + tokens.shape[1] > self.config.context_length:
            after = f" after {cached} cached ones" if cached else ""
            raise InputError(
                f"{tokens.shape[1]} tokens{after} are more than the context_length "
                f"{self.config.context_length}"
            )
        if torch.compiler.is_compiling() or tokens.is_meta or (tokens.is_cuda and self.training):
            return
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.vocab_size:
            worst = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
            raise InputError(
                f"token id {worst} is outside the vocabulary of vocab_size {self.config.vocab_size}"
            )

    def _init_weights(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writes_residual = name.endswith(("out_proj", "feed_forward.down"))
                nn.init.normal_(module.weight, std=residual_std if writes_residual else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def _share_mask(self) -> None:
        """One causal mask a model rather than one a layer."""
        attentions = [module for module in self.modules() if isinstance(module, MultiHeadAttention)]
        for attention in attentions:
            attention.mask = attentions[0].mask

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `.to`, `.cuda` and their like call: they move each layer's mask alone, so share them anew."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._share_mask()
        return self
