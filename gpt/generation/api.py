"""The functions a program calls: `generate` for token ids, `stream` for text; `Engine` gives all details.

Shapes: N prompts, T tokens of a prompt, G new tokens.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpt.errors import InputError
from gpt.generation.engine import Engine
from gpt.generation.sampling import Sampling
from gpt.generation.texts import Request
from gpt.model import GPT
from gpt.text.tokenizer import Tokenizer

Prompts = TypeVar("Prompts", Tensor, Sequence[Sequence[int]])


def generate(
    model: GPT,
    tokens: Prompts,
    *,
    max_new_tokens: int,
    seed: int | None = None,
    end: int | None = None,
    **sampling: Any,
) -> Prompts:
    """Continue each prompt: (N, T) -> (N, T + G), or lists of ids of any lengths, each to a longer list.

    A row's text depends only on its prompt, the seed, and how many rows before it have the same prompt. Past
    the context length the window slides by half a context: see `engine.py`.

    Args:
        model: any GPT; it is left unchanged.
        tokens: prompts (N, T) int64, or a list of lists of ids; at least one token each, or an InputError.
        max_new_tokens: how many to add to each row.
        seed: the same seed gives the same text; None takes a random one.
        end: a row ends after this token, `<|endoftext|>` for example. In a tensor, shorter rows are padded
            with it; G belongs to the longest.
        sampling: how tokens are drawn: temperature, top_k and the other fields of `Sampling`.
    """
    if isinstance(tokens, Tensor) and (tokens.dim() != 2 or tokens.shape[1] == 0):
        expected = "prompts of at least one token, shape (prompts, tokens)"
        raise InputError(f"expected {expected}, got {tuple(tokens.shape)}")
    how: Any = {"max_new_tokens": max_new_tokens, "sampling": Sampling(**sampling), "seed": seed, "end": end}
    prompts = [tuple(row) for row in (tokens.tolist() if isinstance(tokens, Tensor) else tokens)]
    engine, counts = Engine(model), Counter(prompts)  # a prompt of several rows is read once
    requests = {prompt: Request(tokens=prompt, samples=count, **how) for prompt, count in counts.items()}
    samples = {prompt: iter(engine.add(request)) for prompt, request in requests.items()}
    for _ in engine.run():
        pass  # the samples hold the tokens
    rows = [next(samples[prompt]).tokens for prompt in prompts]
    if not isinstance(tokens, Tensor):
        return rows
    longest = max((len(row) for row in rows), default=tokens.shape[1])
    padded = [row + [end or 0] * (longest - len(row)) for row in rows]
    return torch.tensor(padded, dtype=tokens.dtype, device=tokens.device).view(len(rows), longest)


def stream(model: GPT, tokenizer: Tokenizer, prompt: str, **settings: Any) -> Iterator[str]:
    """Yield the text that follows `prompt` piece by piece; the settings are those of `stream_samples`."""
    return (text for _, text in stream_samples(model, tokenizer, prompt, **settings))


def stream_samples(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    num_samples: int = 1,
    allow_special: bool = False,
    graphs: bool = True,
    **settings: Any,
) -> Iterator[tuple[int, str]]:
    """Yield the number of a sample and a piece of its text, up to `<|endoftext|>` or a stop string.

    A piece holds complete characters only and never the beginning of a stop string. The prompt, text or ids,
    is not repeated; an empty one starts a new document. `<|endoftext|>` in text is plain text, with
    `allow_special` the end of a document. `graphs` is the engine's option. The settings are those of a
    `Request`: max_new_tokens, sampling, seed and stop.
    """
    ids = tokenizer.encode(prompt, allow_special=allow_special) if isinstance(prompt, str) else [*prompt]
    engine, end = Engine(model, tokenizer, graphs=graphs), tokenizer.eot
    engine.add(Request(tokens=ids or [end], samples=num_samples, end=end, **settings))
    return ((token.sample.k, token.text) for token in engine.run() if token.text)
