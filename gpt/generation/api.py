"""The functions a program calls: `generate` for token ids, `complete` for all details, `stream` for text.

Shapes: N prompts, T tokens of a prompt, G new tokens.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpt.errors import InputError
from gpt.generation.decoding import for_decoding
from gpt.generation.engine import Engine, Request, Sample, Token
from gpt.generation.sampling import Sampling
from gpt.generation.text import TextEngine, prompt_tokens
from gpt.model import GPT
from gpt.tokenizer import Tokenizer


@dataclass(kw_only=True)
class Completion:
    """A finished sample."""

    sample: Sample
    """All of its tokens, and why it ended."""
    tokens: list[Token] = field(default_factory=list)
    """The new tokens, after those of the prompt with `echo`, with log-probabilities if requested."""


def complete(
    model: GPT, requests: Sequence[Request], *, vocab_size: int | None = None
) -> list[list[Completion]]:
    """Decode requests together; return a list of completions, one for each sample, for each request.

    Raises:
        InputError: a token id outside the vocabulary, or logits that are not finite.
    """
    engine = Engine(for_decoding(model), vocab_size=vocab_size)
    completions = [[Completion(sample=sample) for sample in engine.add(request)] for request in requests]
    by_sample = {one.sample: one for some in completions for one in some}
    while engine.busy:
        for token in engine.step():
            by_sample[token.sample].tokens.append(token)
        _raise_failed(engine)
    return completions


Prompts = TypeVar("Prompts", Tensor, Sequence[Sequence[int]])


def generate(
    model: GPT,
    tokens: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    end: int | None = None,
    vocab_size: int | None = None,
) -> Prompts:
    """Continue each prompt: (N, T) -> (N, T + G), or lists of ids of any lengths, each to a longer list.

    A row's text depends only on its prompt, the seed, and how many rows before it have the same prompt. So
    the k-th sample of a prompt does not depend on the number of samples or on other prompts. Past the context
    length the window slides by half a context: see `engine.py`.

    To call this often with one model, prepare it once with `for_decoding`.

    Args:
        model: any GPT; it is left unchanged.
        tokens: prompts (N, T) int64, or a list of lists of ids; at least one token each.
        max_new_tokens: how many to add to each row.
        temperature: divides the logits; 0 is greedy, 1 the model's own distribution.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the smallest set of tokens whose probability reaches p.
        min_p: draw from tokens at least p times as likely as the likeliest.
        repetition_penalty: above 1, tokens that came before are less likely.
        seed: the same seed gives the same text; None takes a random one.
        end: a row ends after this token, `<|endoftext|>` for example. In a tensor, shorter rows are padded
            with it; G belongs to the longest.
        vocab_size: ids from here on are never drawn; for a model whose vocabulary is padded.

    Raises:
        InputError: an argument is out of its range, or a prompt is empty.
    """
    if isinstance(tokens, Tensor) and (tokens.dim() != 2 or tokens.shape[1] == 0):
        raise InputError(
            f"expected prompts of at least one token, shape (prompts, tokens), got {tuple(tokens.shape)}"
        )
    sampling = Sampling(
        repetition_penalty=repetition_penalty, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    prompts = [tuple(row) for row in (tokens.tolist() if isinstance(tokens, Tensor) else tokens)]
    counts = Counter(prompts)  # a prompt that several rows share is read once
    requests = [
        Request(
            tokens=prompt, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, samples=count, end=end
        )
        for prompt, count in counts.items()
    ]
    completions = complete(model, requests, vocab_size=vocab_size)
    samples = {prompt: iter(some) for prompt, some in zip(counts, completions, strict=True)}
    rows = [next(samples[prompt]).sample.tokens for prompt in prompts]
    if not isinstance(tokens, Tensor):
        return rows
    longest = max((len(row) for row in rows), default=tokens.shape[1])
    padded = [row + [end or 0] * (longest - len(row)) for row in rows]
    return torch.tensor(padded, dtype=tokens.dtype, device=tokens.device).view(len(rows), longest)


def stream(model: GPT, tokenizer: Tokenizer, prompt: str, **settings: Any) -> Iterator[str]:
    """Yield the text that follows `prompt` piece by piece; the settings are those of `stream_samples`."""
    for _, text in stream_samples(model, tokenizer, prompt, **settings):
        yield text


def stream_samples(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    seed: int | None = None,
    stop: Sequence[str] = (),
    allow_special: bool = False,
) -> Iterator[tuple[int, str]]:
    """Yield the number of a sample and a piece of its text, up to `<|endoftext|>` or a stop string.

    A piece holds complete characters only and never the beginning of a stop string. All samples are decoded
    together. An empty prompt starts a new document.

    Args:
        model: any GPT; it is left unchanged.
        tokenizer: the model's.
        prompt: what the text follows; it is not repeated.
        max_new_tokens: the most tokens of a sample.
        num_samples: how many texts to write.
        sampling: how tokens are drawn.
        seed: the same seed gives the same text; None takes a random one.
        stop: strings at which a text ends; they are not part of it.
        allow_special: whether `<|endoftext|>` in the prompt is the end of a document rather than plain text.

    Raises:
        InputError: an argument is out of its range.
    """
    engine = TextEngine(model, tokenizer)
    request = Request(
        tokens=prompt_tokens(tokenizer, prompt, allow_special=allow_special),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        samples=num_samples,
        end=tokenizer.eot,
    )
    engine.add(request, stop)
    while engine.busy:
        for piece in engine.step():
            if piece.text:
                yield piece.token.sample.k, piece.text
        _raise_failed(engine)


def _raise_failed(engine: Engine | TextEngine) -> None:
    """Raise the error of the first sample that failed in the last step."""
    for sample in engine.take_failed():
        raise sample.error or RuntimeError("a sample failed")
