"""One small GPT-2 as three programs store it; transformers computes what each must give.

What the others store is written from the layouts that they document, tensor by tensor, and shares no code
with the package: a transposed or misplaced matrix cannot go unnoticed.
"""

import torch
from torch import Tensor, nn


def randomised(model: nn.Module) -> nn.Module:
    """Draw every weight at random, norms and biases too, so that none is zero or one."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def huggingface_model(*, qkv_bias: bool = True, **changes):
    """A small GPT2LMHeadModel of transformers; without `qkv_bias` those of its c_attn are zeros."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 300, "n_positions": 24, "n_embd": 48, "n_head": 3, "n_layer": 2}
    special = {"bos_token_id": 299, "eos_token_id": 299}
    model = randomised(GPT2LMHeadModel(GPT2Config(**{**shape, **special, **changes})))
    for block in model.transformer.h:
        block.attn.c_attn.bias.data *= qkv_bias
    return model


def nanogpt_checkpoint(theirs, *, bias: bool = True) -> dict:
    """A checkpoint of nanoGPT's train.py, with the optimizer's state: nn.Linear's matrices are (out, in)."""
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = {
        name: tensor.T.contiguous() if name.endswith(turned) else tensor
        for name, tensor in theirs.state_dict().items()
        if bias or not name.endswith(".bias")
    }
    sizes = {
        "n_layer": 2,
        "n_head": 3,
        "n_embd": 48,
        "block_size": 24,
        "vocab_size": len(state["lm_head.weight"]),
    }
    return {
        "model": state,
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": {**sizes, "bias": bias, "dropout": 0.0},
        "iter_num": 5,
        "best_val_loss": torch.tensor(1.0),
        "config": {"dataset": "openwebtext", "batch_size": 12},
    }


def book_state(theirs, *, qkv_bias: bool = True) -> dict[str, Tensor]:
    """The state dict of the book's GPTModel, as its chapter 5 fills one with GPT-2's weights."""
    gpt, width = theirs.transformer, 48
    state = {"tok_emb.weight": gpt.wte.weight, "pos_emb.weight": gpt.wpe.weight}
    for i, block in enumerate(gpt.h):
        here = f"trf_blocks.{i}"
        state[f"{here}.att.mask"] = torch.ones(24, 24).triu(1)
        for place, name in enumerate(("W_query", "W_key", "W_value")):
            columns = slice(place * width, (place + 1) * width)
            state[f"{here}.att.{name}.weight"] = block.attn.c_attn.weight[:, columns].T
            if qkv_bias:
                state[f"{here}.att.{name}.bias"] = block.attn.c_attn.bias[columns]
        for name, layer in (
            ("att.out_proj", block.attn.c_proj),
            ("ff.layers.0", block.mlp.c_fc),
            ("ff.layers.2", block.mlp.c_proj),
        ):
            state |= {f"{here}.{name}.weight": layer.weight.T, f"{here}.{name}.bias": layer.bias}
        for name, norm in (("norm1", block.ln_1), ("norm2", block.ln_2)):
            state |= {f"{here}.{name}.scale": norm.weight, f"{here}.{name}.shift": norm.bias}
    state |= {"final_norm.scale": gpt.ln_f.weight, "final_norm.shift": gpt.ln_f.bias}
    state["out_head.weight"] = theirs.lm_head.weight
    return {name: tensor.detach().clone() for name, tensor in state.items()}
