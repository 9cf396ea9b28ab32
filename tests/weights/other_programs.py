"""Small models of other programs to compare with.

The classes are written from the layouts that those programs document and share no code with the package, so
that a transposed or misplaced matrix cannot go unnoticed.
"""

import math

import torch
from torch import Tensor, nn


def randomised(model: nn.Module) -> nn.Module:
    """Draw every weight at random, norms and biases too, so that none is zero or one."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def exact_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """Causal attention, (B, T, D) each, one head at a time."""
    outputs = []
    later = torch.ones(query.shape[1], query.shape[1]).triu(1).bool()
    for q, k, v in zip(*(x.chunk(heads, dim=-1) for x in (query, key, value)), strict=True):
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -torch.inf)
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, dim=-1)


class NanoGPT:
    """What nanoGPT computes from a checkpoint's `model` and `model_args`."""

    def __init__(self, checkpoint: dict, gelu=exact_gelu) -> None:
        self.w, self.args, self.gelu = checkpoint["model"], checkpoint["model_args"], gelu

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def _norm(self, name: str, x: Tensor) -> Tensor:
        bias = self.w.get(f"{name}.bias")
        return nn.functional.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], bias, 1e-5)

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.w["transformer.wte.weight"][tokens] + self.w["transformer.wpe.weight"][: tokens.shape[1]]
        for i in range(self.args["n_layer"]):
            here = f"transformer.h.{i}"
            qkv = self._linear(f"{here}.attn.c_attn", self._norm(f"{here}.ln_1", x))
            query, key, value = qkv.chunk(3, dim=-1)
            x = x + self._linear(f"{here}.attn.c_proj", attend(query, key, value, self.args["n_head"]))
            up = self._linear(f"{here}.mlp.c_fc", self._norm(f"{here}.ln_2", x))
            x = x + self._linear(f"{here}.mlp.c_proj", self.gelu(up))
        return self._norm("transformer.ln_f", x) @ self.w["lm_head.weight"].T


def nanogpt_checkpoint(*, bias: bool = True, vocab_size: int = 300) -> dict:
    """A checkpoint like those of its train.py, with the optimizer's state."""
    wte = torch.randn(vocab_size, 48) * 0.2
    model = {"transformer.wte.weight": wte, "transformer.wpe.weight": torch.randn(24, 48) * 0.2}

    def layer(name: str, *shape: int) -> None:
        model[f"transformer.{name}.weight"] = torch.randn(*shape) * 0.2
        if bias:
            model[f"transformer.{name}.bias"] = torch.randn(shape[0]) * 0.2

    for i in range(2):
        layer(f"h.{i}.ln_1", 48)
        layer(f"h.{i}.attn.c_attn", 144, 48)
        layer(f"h.{i}.attn.c_proj", 48, 48)
        layer(f"h.{i}.ln_2", 48)
        layer(f"h.{i}.mlp.c_fc", 192, 48)
        layer(f"h.{i}.mlp.c_proj", 48, 192)
    layer("ln_f", 48)
    model["lm_head.weight"] = wte
    args = {"n_layer": 2, "n_head": 3, "n_embd": 48, "block_size": 24, "bias": bias}
    return {
        "model": model,
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": {**args, "vocab_size": vocab_size, "dropout": 0.0},
        "iter_num": 5,
        "best_val_loss": torch.tensor(1.0),
        "config": {"dataset": "openwebtext", "batch_size": 12},
    }


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.scale * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) + self.shift


class _Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return tanh_gelu(x)


class _Attention(nn.Module):
    def __init__(self, settings: dict) -> None:
        super().__init__()
        width, context = settings["emb_dim"], settings["context_length"]
        self.heads = settings["n_heads"]
        for name in ("W_query", "W_key", "W_value"):
            setattr(self, name, nn.Linear(width, width, bias=settings["qkv_bias"]))
        self.out_proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.triu(torch.ones(context, context), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(attend(self.W_query(x), self.W_key(x), self.W_value(x), self.heads))


class _FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), _Gelu(), nn.Linear(4 * width, width))


class _Block(nn.Module):
    def __init__(self, settings: dict) -> None:
        super().__init__()
        width = settings["emb_dim"]
        self.att, self.ff = _Attention(settings), _FeedForward(width)
        self.norm1, self.norm2 = _Norm(width), _Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.norm1(x))
        return x + self.ff.layers(self.norm2(x))


class BookGPT(nn.Module):
    """The layout of the book's GPTModel: its names, its masks, its untied head."""

    def __init__(self, settings: dict) -> None:
        super().__init__()
        width = settings["emb_dim"]
        self.tok_emb = nn.Embedding(settings["vocab_size"], width)
        self.pos_emb = nn.Embedding(settings["context_length"], width)
        self.trf_blocks = nn.Sequential(*[_Block(settings) for _ in range(settings["n_layers"])])
        self.final_norm = _Norm(width)
        self.out_head = nn.Linear(width, settings["vocab_size"], bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1]))
        return self.out_head(self.final_norm(self.trf_blocks(x)))


BOOK_SETTINGS = {
    "vocab_size": 300,
    "context_length": 24,
    "emb_dim": 48,
    "n_heads": 3,
    "n_layers": 2,
    "drop_rate": 0.1,
    "qkv_bias": False,
}


def huggingface_model(**changes):
    """A small GPT2LMHeadModel of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 300, "n_positions": 24, "n_embd": 48, "n_head": 3, "n_layer": 2}
    special = {"bos_token_id": 299, "eos_token_id": 299}
    return randomised(GPT2LMHeadModel(GPT2Config(**{**shape, **special, **changes})))
