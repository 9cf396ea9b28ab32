"""Walk through ten steps to multi-head attention, each value beside the one that the book prints.

    python scripts/examples/attention_walkthrough.py --output runs/attention-walkthrough

It stops with an error where a value differs. It writes `steps.png`, heat maps of the attention weights of the
steps in `DRAWN`; where a step has two heads, those of the first.

Shapes: B batch, T tokens, D width of a token, K width of a head, H heads.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpt.attention import (
    CausalAttention,
    MultiHeadAttention,
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
from gpt.attention.kernels import attend

DRAWN = {
    "S1": "S1 no weights to train",
    "S2": "S2 trained matrices",
    "S4": "S4 mask and dropout",
    "S5": "S5, S6, S10 a module",
    "S8": "S8 heads in one product",
    "S9": "S9 one projection",
}
"""The title of each step whose weights look different from the others'."""
WORDS = ["Your", "journey", "starts", "with", "one", "step"]


def rows_of(text: str) -> list[list[float]]:
    """Numbers, of which a slash separates the rows."""
    return [[float(number) for number in row.split()] for row in text.split("/")]


INPUTS = torch.tensor(
    rows_of(
        "0.43 0.15 0.89 / 0.55 0.87 0.66 / 0.57 0.85 0.64 / 0.22 0.58 0.33 / 0.77 0.25 0.1 / 0.05 0.8 0.55"
    )
)  # (T, D)
BATCH = torch.stack([INPUTS, INPUTS])  # (B, T, D)
HEADS = torch.tensor(
    [
        rows_of("0.2745 0.6584 0.2775 0.8573 / 0.8993 0.0390 0.9268 0.7388 / 0.7179 0.7058 0.9156 0.4340"),
        rows_of("0.0772 0.3565 0.1479 0.5331 / 0.4066 0.2318 0.4545 0.9737 / 0.4606 0.5159 0.4220 0.5786"),
    ]
)[None]  # (1, H, T, K)

# What the chapters print, to four decimals; rows are separated by a slash. The tests read these values too.
PRINTED = {
    "S1 scores of token 2": "0.9544 1.4950 1.4754 0.8434 0.7070 1.0865",
    "S1 weights of token 2, by sum": "0.1455 0.2278 0.2249 0.1285 0.1077 0.1656",
    "S1 weights of token 2, by softmax": "0.1385 0.2379 0.2333 0.1240 0.1082 0.1581",
    "S1 context vector of token 2": "0.4419 0.6515 0.5683",
    "S2 query of token 2": "0.4306 1.4551",
    "S2 score of token 2 with itself": "1.8524",
    "S2 scores of token 2": "1.2705 1.8524 1.8111 1.0795 0.5577 1.5440",
    "S2 weights of token 2": "0.1500 0.2264 0.2199 0.1311 0.0906 0.1820",
    "S2 context vectors": "0.2996 0.8053 / 0.3061 0.8210 / 0.3058 0.8203 / 0.2948 0.7939 /"
    " 0.2927 0.7891 / 0.2990 0.8040",
    "S3 context vectors": "-0.0739 0.0713 / -0.0748 0.0703 / -0.0749 0.0702 / -0.0760 0.0685 /"
    " -0.0763 0.0679 / -0.0754 0.0693",
    "S4 weights of token 2": "0.5517 0.4483",
    "S4 weights of token 6": "0.1935 0.1663 0.1666 0.1542 0.1666 0.1529",
    "S6 two heads of width 2": "-0.4519 0.2216 0.4772 0.1063 / -0.5874 0.0058 0.5891 0.3257 /"
    " -0.6300 -0.0632 0.6202 0.3860 / -0.5675 -0.0843 0.5478 0.3589 / -0.5526 -0.0981 0.5321 0.3428 /"
    " -0.5299 -0.1081 0.5077 0.3493",
    "S6 two heads of width 1": "-0.5740 0.2216 / -0.7320 0.0155 / -0.7774 -0.0546 / -0.6979 -0.0817 /"
    " -0.6538 -0.0957 / -0.6424 -0.1065",
    "S7 two heads of width 1": "0.3190 0.4858 / 0.2943 0.3897 / 0.2856 0.3593 / 0.2693 0.3873 /"
    " 0.2639 0.3928 / 0.2575 0.4028",
    "S8 head 1, token 1": "1.3208 1.1631 1.2879",
    "S8 head 2, token 1": "0.4391 0.7003 0.5903",
}


def main() -> None:
    """Run all ten steps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/attention-walkthrough"), help="for the pictures"
    )
    output = parser.parse_args().output
    maps = {
        "S1": without_weights(),
        "S2": trainable_parameters(),
        "S3": linear_layers(),
        "S4": causal_masks(),
        "S5": causal_attention(),
        "S6": stacked_heads(),
        "S7": split_heads(),
        "S8": products_of_heads(),
        "S9": fused_projection(),
        "S10": the_same_numbers(),
    }
    picture({title: maps[step] for step, title in DRAWN.items()}, output / "steps.png")
    print(f"\nAll values are the chapters'. The attention weights: {output / 'steps.png'}")


def without_weights() -> Tensor:
    title("S1  Self-attention without weights to train")
    scores = attention_scores(INPUTS)  # (T, T)
    compare("S1 scores of token 2", scores[1])
    agree("the loop over dot products and the matrix product", attention_scores_by_loop(INPUTS), scores)
    compare("S1 weights of token 2, by sum", normalise_by_sum(scores)[1])
    weights = torch.softmax(scores, dim=-1)  # (T, T)
    compare("S1 weights of token 2, by softmax", weights[1])
    agree("the naive softmax and torch's", softmax_naive(scores), weights)
    compare("S1 context vector of token 2", context_vectors(weights, INPUTS)[1])
    return weights


def trainable_parameters() -> Tensor:
    title("S2  SelfAttention_v1: weights to train")
    torch.manual_seed(123)
    system = SelfAttention_v1(3, 2)
    query, key, value = INPUTS @ system.W_query, INPUTS @ system.W_key, INPUTS @ system.W_value  # (T, K)
    compare("S2 query of token 2", query[1])
    compare("S2 score of token 2 with itself", query[1] @ key[1])
    compare("S2 scores of token 2", query[1] @ key.T)
    weights = attend(query, key, value)[1]  # (T, T)
    compare("S2 weights of token 2", weights[1])
    compare("S2 context vectors", system(INPUTS))
    return weights


def linear_layers() -> Tensor:
    title("S3  SelfAttention_v2: the weights in nn.Linear")
    torch.manual_seed(789)
    v2 = SelfAttention_v2(3, 2)
    compare("S3 context vectors", v2(INPUTS))
    v1 = SelfAttention_v1(3, 2)
    for name in ("W_query", "W_key", "W_value"):
        setattr(v1, name, nn.Parameter(getattr(v2, name).weight.T))
    agree("v1 with v2's weights transposed and v2", v1(INPUTS), v2(INPUTS))
    return torch.softmax(scores_of(v2), dim=-1)


def causal_masks() -> Tensor:
    title("S4  The causal mask: later tokens hidden")
    torch.manual_seed(789)
    scores = scores_of(SelfAttention_v2(3, 2))
    weights = torch.softmax(mask_by_infinity(scores), dim=-1)
    renormalised = mask_by_renormalising(torch.softmax(scores, dim=-1))
    agree("zeroing and renormalising, and -inf before the softmax", renormalised, weights)
    compare("S4 weights of token 2", weights[1, :2])
    compare("S4 weights of token 6", weights[5])
    return nn.Dropout(0.5)(weights)  # half of them zero, the others doubled; which depends on the platform


def causal_attention() -> Tensor:
    title("S5  CausalAttention: a batch, the mask in a buffer, dropout")
    torch.manual_seed(123)
    system = CausalAttention(3, 2, context_length=6, dropout=0.0)
    weights = torch.softmax(mask_by_infinity(scores_of(system)), dim=-1)
    agree("it and S3 with the mask of S4", system(BATCH)[0], weights @ system.W_value(INPUTS))
    return weights


def stacked_heads() -> Tensor:
    title("S6  MultiHeadAttentionWrapper: causal heads side by side")
    torch.manual_seed(123)
    wrapper = MultiHeadAttentionWrapper(3, 2, context_length=6, dropout=0.0, num_heads=2)
    compare("S6 two heads of width 2", wrapper(BATCH)[0])
    torch.manual_seed(123)
    compare("S6 two heads of width 1", MultiHeadAttentionWrapper(3, 1, 6, 0.0, num_heads=2)(BATCH)[0])
    return torch.softmax(mask_by_infinity(scores_of(wrapper.heads[0])), dim=-1)


def split_heads() -> Tensor:
    title("S7  MultiHeadAttention: one projection each, split into heads")
    torch.manual_seed(123)
    split = MultiHeadAttention(3, 2, context_length=6, dropout=0.0, num_heads=2)
    out, weights = split(BATCH, need_weights=True)  # (B, T, H * K), (B, H, T, T)
    compare("S7 two heads of width 1", out[0])
    agree("the written-out and the fused computation", split(BATCH), out)
    return weights[0, 0]


def products_of_heads() -> Tensor:
    title("S8  One batched product for all heads")
    scores = scores_of_heads(HEADS, HEADS)  # (1, H, T, T)
    compare("S8 head 1, token 1", scores[0, 0, 0])
    compare("S8 head 2, token 1", scores[0, 1, 0])
    agree("it and each head by itself", scores[0], torch.stack([head @ head.T for head in HEADS[0]]))
    return torch.softmax(scores[0, 0], dim=-1)


def fused_projection() -> Tensor:
    title("S9  MultiHeadAttn: query, key and value from one projection")
    torch.manual_seed(123)
    split = identity_projection(MultiHeadAttention(4, 4, context_length=6, dropout=0.0, num_heads=2))
    fused, x = MultiHeadAttn(n_embd=4, block_size=6, n_heads=2), torch.randn(2, 6, 4)
    parts = split.W_query.weight, split.W_key.weight, split.W_value.weight
    fused.c_attn.weight = nn.Parameter(torch.cat(parts))
    fused.c_attn.bias = nn.Parameter(torch.zeros(12))  # S7 has none here
    agree("it and S7 with the same weights", fused(x), split(x))
    return split(x, need_weights=True)[1][0, 0]


def the_same_numbers() -> Tensor:
    title("S10 S6 and S7 with the same weights give the same numbers")
    torch.manual_seed(123)
    wrapper = MultiHeadAttentionWrapper(3, 2, context_length=6, dropout=0.0, num_heads=2)
    split = identity_projection(MultiHeadAttention(3, 4, context_length=6, dropout=0.0, num_heads=2))
    for name in ("W_query", "W_key", "W_value"):
        stacked = torch.cat([getattr(head, name).weight for head in wrapper.heads])
        getattr(split, name).weight = nn.Parameter(stacked)
    out, weights = split(BATCH, need_weights=True)  # (B, T, H * K), (B, H, T, T)
    agree("S6 and S7 with the same weights", wrapper(BATCH), out)
    print("    S7 is faster than S6: see scripts/benchmark.py attention")
    return weights[0, 0]


def scores_of(head: Any) -> Tensor:
    """The scaled scores (T, T) of a head for the six words."""
    return head.W_query(INPUTS) @ head.W_key(INPUTS).T / 2**0.5


def picture(maps: dict[str, Tensor], path: Path) -> None:
    """Draw the weights (T, T) of each step in `DRAWN`: a row for each token, dark where it attends."""
    from matplotlib.figure import Figure

    from gpt.pictures.figures import save

    figure = Figure(figsize=(7, 5.6), layout="constrained")  # 840 pixels, the width of a page on GitHub
    for (name, found), axes in zip(maps.items(), figure.subplots(2, 3).flat, strict=True):
        weights = found.detach().numpy()
        axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0)
        for row, column in product(range(len(weights)), repeat=2):
            weight = float(weights[row, column])
            color = "white" if weight > 0.6 else "black"
            if weight:
                number = f"{weight:.2f}".removeprefix("0") if weight < 1 else f"{weight:.0f}"
                axes.text(column, row, number, ha="center", va="center", fontsize=10, color=color)
        words = WORDS[: len(weights)]
        axes.set_xticks(range(len(words)), words, rotation=60, fontsize=10)
        axes.set_yticks(range(len(words)), words, fontsize=10)
        axes.set_title(name, fontsize=11)
    save(figure, path)


def identity_projection(split: MultiHeadAttention) -> MultiHeadAttention:
    """S6 and S9 have no output projection: make S7's do nothing."""
    split.out_proj.weight = nn.Parameter(torch.eye(split.d_out))
    split.out_proj.bias = nn.Parameter(torch.zeros(split.d_out))
    return split


def title(text: str) -> None:
    print(f"\n{text}")


def compare(name: str, value: Tensor) -> None:
    """Print `value` beside the chapter's, row by row; stop if they differ in the fourth decimal."""
    printed = rows_of(PRINTED[name])
    rows = value.detach().reshape(len(printed), -1)  # rows as the chapter prints them
    print(f"    {name[3:]}")
    for row, chapter in zip(rows.tolist(), printed, strict=True):
        ours, theirs = (" ".join(f"{x:7.4f}" for x in numbers) for numbers in (row, chapter))
        print(f"        {ours}   chapter {theirs}")
    # S8 starts from printed, rounded values, so that its products are good to a unit of the last place.
    tolerance = 1.1e-4 if name.startswith("S8") else 6e-5
    if not torch.allclose(rows, torch.tensor(printed), atol=tolerance, rtol=0):
        raise SystemExit(f"error: {name} differ from the chapter's")


def agree(what: str, one: Tensor, other: Tensor) -> None:
    """Print that two ways give the same numbers; stop if they do not."""
    if not torch.allclose(one, other, atol=1e-6):
        raise SystemExit(f"error: {what} do not agree")
    print(f"    {what} agree")


if __name__ == "__main__":
    main()
