"""What a program calls: `generate` for token ids, `complete` for all there is to know, `stream` for text.

Shapes: N prompts, T tokens of a prompt, G new tokens.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from gpt.errors import InputError
from gpt.generation.engine import Engine, Request, Sample, Token
from gpt.generation.packed import for_decoding
from gpt.generation.sampling import Sampling
from gpt.generation.text import TextStream
from gpt.model import GPT
from gpt.tokenizer import Tokenizer


@dataclass(kw_only=True)
class Completion:
    """A sample that has ended."""

    sample: Sample
    """Its tokens, and why it ended."""
    tokens: list[Token] = field(default_factory=list)
    """The new ones, with their log-probabilities if they were asked for."""


def complete(
    model: GPT, requests: Sequence[Request], *, vocab_size: int | None = None
) -> list[list[Completion]]:
    """Decode requests together; a list of completions, one a sample, for each request.

    Raises:
        InputError: a token id outside the vocabulary.
    """
    engine = Engine(for_decoding(model), vocab_size=vocab_size)
    completions = [[Completion(sample=sample) for sample in engine.add(request)] for request in requests]
    of = {id(one.sample): one for some in completions for one in some}
    while engine.busy:
        for token in engine.step():
            of[id(token.sample)].tokens.append(token)
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

    A row's text depends on its prompt, the seed, and how many rows before it have the same prompt: so the
    k-th sample of a prompt is the same however many samples and other prompts there are. Rows with one prompt
    share its reading. Past the context length the window slides by half a context: see `engine.py`.

    A model that is used again and again is best made ready once, with `for_decoding`.

    Args:
        model: any GPT; it is left as it was.
        tokens: prompts (N, T) int64, or a list of lists of ids; at least one token each.
        max_new_tokens: how many to add to each row.
        temperature: divides the logits; 0 is greedy, 1 the model's own distribution.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the smallest set of tokens whose probability reaches p.
        min_p: draw from tokens at least p times as likely as the likeliest.
        repetition_penalty: makes tokens that came before less likely; 1 does not.
        seed: the same seed gives the same text; None takes a fresh one.
        end: a row ends with this token, the end of text say. In a tensor, rows that ended are filled up with
            it; G is the number of tokens of the longest.
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
    asked: dict[tuple[int, ...], Request] = {
        prompt: Request(
            tokens=prompt, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, samples=count, end=end
        )
        for prompt, count in Counter(prompts).items()
    }
    answers = complete(model, list(asked.values()), vocab_size=vocab_size)
    of_prompt = {prompt: iter(some) for prompt, some in zip(asked, answers, strict=True)}
    rows = [next(of_prompt[prompt]).sample.tokens for prompt in prompts]
    if not isinstance(tokens, Tensor):
        return rows
    longest = max((len(row) for row in rows), default=tokens.shape[1])
    filled = [row + [end or 0] * (longest - len(row)) for row in rows]
    return torch.tensor(filled, dtype=tokens.dtype, device=tokens.device).view(len(rows), longest)


def stream(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    seed: int | None = None,
    stop: Sequence[str] = (),
    allow_special: bool = False,
) -> Iterator[str]:
    """Yield the text that follows `prompt`, piece by piece; see `stream_samples`."""
    for _, piece in stream_samples(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        stop=stop,
        allow_special=allow_special,
    ):
        yield piece


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
    """Yield the number of a sample and a piece of its text, up to the end of the document or a stop string.

    A piece is never a broken character, nor the beginning of a stop string: both wait until they are known.
    All samples are decoded together. An empty prompt starts a new document.

    Args:
        model: any GPT; it is left as it was.
        tokenizer: the model's.
        prompt: what the text follows; it is not repeated.
        max_new_tokens: the most tokens of a sample.
        num_samples: how many texts to write.
        sampling: how tokens are drawn.
        seed: the same seed gives the same text; None takes a fresh one.
        stop: strings at which a text ends; they are not part of it.
        allow_special: whether `<|endoftext|>` in the prompt stands for the end of text.

    Raises:
        InputError: an argument is out of its range.
    """
    engine = Engine(for_decoding(model), vocab_size=min(tokenizer.n_vocab, model.config.vocab_size))
    request = Request(
        tokens=tokenizer.encode(prompt, allow_special=allow_special) or [tokenizer.eot],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        samples=num_samples,
        end=tokenizer.eot,
    )
    engine.add(request)
    texts = [TextStream(tokenizer, stop) for _ in range(num_samples)]
    while engine.busy:
        for token in engine.step():
            text = texts[token.sample.k]
            piece = text.feed(token.id)
            if text.stopped:
                engine.cancel(token.sample)
            if token.sample.finished:
                piece += text.close()
            if piece:
                yield token.sample.k, piece
