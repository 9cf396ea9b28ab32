"""Writing text with a GPT: pure sampling functions, and the loop that calls them.

Shapes: N samples, T tokens so far, V vocab_size.
"""

import codecs
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from gpt.checkpoint import load
from gpt.errors import InputError
from gpt.model import GPT
from gpt.tokenizer import Tokenizer


def filter_logits(logits: Tensor, *, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Set to -inf what top-k and nucleus sampling leave out: (N, V) -> (N, V).

    `top_k` keeps the k likeliest tokens (Fan et al. 2018, section 5.4); `top_p` keeps the smallest set whose
    probability reaches p, always the likeliest token (Holtzman et al. 2020, section 3.1).
    """
    if top_k is not None and top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]  # (N, 1)
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p is not None and top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)  # (N, V)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # the mass of what is likelier
        ordered = ordered.masked_fill(before >= top_p, -torch.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return logits


def sample(
    logits: Tensor,
    generators: list[torch.Generator],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Draw a token for each row: logits (N, V) -> ids (N,). A temperature of 0 takes the likeliest.

    Row k draws from `generators[k]` alone, so a sample does not depend on how many others there are.
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = filter_logits(logits.float() / temperature, top_k=top_k, top_p=top_p).softmax(dim=-1)
    rows = zip(probabilities.cpu(), generators, strict=True)
    drawn = [torch.multinomial(row, 1, generator=generator) for row, generator in rows]
    return torch.cat(drawn).to(logits.device)


@torch.inference_mode()
def steps(
    model: GPT,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of each row, ids (N,), `max_new_tokens` times; `tokens` are prompts (N, T).

    Past the context length the model sees the last `context_length` tokens.

    Raises:
        InputError: an argument is out of its range, or the prompt is empty.
    """
    _check(tokens, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    first_seed = torch.seed() if seed is None else seed
    generators = [torch.Generator().manual_seed((first_seed + k) % 2**63) for k in range(len(tokens))]
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            features = model.features(tokens[:, -model.config.context_length :])  # (N, T, D)
            logits = model.head(features[:, -1])  # (N, V)
            new = sample(logits, generators, temperature=temperature, top_k=top_k, top_p=top_p)  # (N,)
            tokens = torch.cat([tokens, new[:, None]], dim=1)
            yield new
    finally:
        model.train(was_training)


def generate(
    model: GPT,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Tensor:
    """Continue each row of `tokens`: (N, T) -> (N, T + max_new_tokens).

    Args:
        model: any GPT; it is left in the mode, training or evaluation, that it was in.
        tokens: prompts (N, T) int64 of one length, T at least 1.
        max_new_tokens: how many to add to each row.
        temperature: divides the logits; 0 is greedy, 1 the model's own distribution.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the smallest set of tokens whose probability reaches p.
        seed: row k draws from a generator seeded with `seed + k`; None takes a fresh seed.

    Raises:
        InputError: an argument is out of its range, or the prompt is empty.
    """
    new = steps(
        model,
        tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    return torch.cat([tokens, *(ids[:, None] for ids in new)], dim=1)


def stream_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> Iterator[str]:
    """Yield the text that follows `prompt`, piece by piece, up to the end of the document.

    A piece is never a broken character: bytes wait until they are whole UTF-8. An empty prompt starts a new
    document.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eot]], device=device)  # (1, T)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    for new in steps(model, tokens, max_new_tokens=max_new_tokens, **settings):  # type: ignore[arg-type]
        if new.item() == tokenizer.eot:
            break
        piece = decoder.decode(tokenizer.decode_bytes(new.tolist()))
        if piece:
            yield piece
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest


def _check(
    tokens: Tensor, *, max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise InputError(
            f"expected a prompt of at least one token, shape (samples, tokens), got {tuple(tokens.shape)}"
        )
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if not temperature >= 0:
        raise InputError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p must be in (0, 1], got {top_p}")


def write(
    checkpoint: Path | None = None,
    prompt: str = "",
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    seed: int | None = None,
    num_samples: int = 1,
) -> None:
    """Write text that follows a prompt, shown as it comes.

    Args:
        checkpoint: a .ckpt file, a run folder or an exported folder; the newest run if left out.
        prompt: what the text begins with; empty starts a new document.
        max_new_tokens: stop after so many tokens, or at the end of the document.
        temperature: 0 always takes the likeliest token, 1 is the model's own distribution.
        top_k: draw from the k likeliest tokens only; null for all.
        top_p: draw from the likeliest tokens that together have this probability.
        seed: the same seed gives the same text.
        num_samples: how many texts to write.
    """
    if num_samples < 1:
        raise InputError(f"num_samples must be at least 1, got {num_samples}")
    model, tokenizer = load(checkpoint)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    for k in range(num_samples):
        if num_samples > 1:
            print(f"{'' if k == 0 else chr(10)}--- sample {k + 1}")
        pieces = stream_text(
            model,
            tokenizer,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=None if seed is None else seed + k,
        )
        print(prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
