"""The functions for programs: `generate` for token ids, `stream_samples` for text. `Engine` has all details.

Shapes: N prompts, T tokens of a prompt, G new tokens.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gpt.errors import InputError, check_least
from gpt.generation.decoding import BackendName
from gpt.generation.engine import Engine
from gpt.generation.healing import Prompt, typed_prompt
from gpt.generation.samples import Request
from gpt.generation.sampling import Sampling
from gpt.model import GPT
from gpt.text.tokenizer import Tokenizer

Prompts = TypeVar("Prompts", Tensor, Sequence[Sequence[int]])


def generate(
    model: GPT,
    tokens: Prompts,
    *,
    max_new_tokens: int,
    seed: int | None = None,
    heal: Tokenizer | None = None,
    backend: BackendName = "auto",
    repetition_penalty: float = Sampling.repetition_penalty,
    temperature: float = Sampling.temperature,
    top_k: int | None = Sampling.top_k,
    top_p: float | None = Sampling.top_p,
    min_p: float | None = Sampling.min_p,
) -> Prompts:
    """Continue each prompt: (N, T) -> (N, T + G). Lists of ids may differ in length; each becomes longer.

    A row's text depends only on its prompt, the seed, and the number of earlier rows with the same prompt.
    Where PyTorch computes, it depends also on the rounding of logits, which other rows change. Past the
    context length, the window slides by half a context: see `engine.py`.

    Args:
        model: any GPT; it is left unchanged.
        tokens: prompts (N, T) int64, or a list of lists of ids. Each has at least one token.
        max_new_tokens: G, how many to add to each row.
        seed: the same seed gives the same text; None takes a random one.
        heal: the tokenizer, if the prompts are lists of its ids for typed texts. A typed text may end inside
            a token, so its last word may then be cut into other tokens. By default ids are left as they are.
        backend: who computes logits: see `Engine`.
        repetition_penalty, temperature, top_k, top_p, min_p: how tokens are drawn, see `Sampling`.

    Raises:
        InputError: an empty prompt, an id outside the vocabulary, or a setting out of its range.
    """
    if isinstance(tokens, Tensor):
        if tokens.dim() != 2:
            raise InputError(f"expected tokens of shape (prompts, tokens), got {tuple(tokens.shape)}")
        if heal:
            raise InputError("expected prompts as lists of ids: rows whose ends change may differ in length")
    sampling = Sampling(
        repetition_penalty=repetition_penalty, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    rows = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    prompts = [tuple(row) for row in rows]
    engine = Engine(model, heal, backend=backend)
    samples = {}
    for prompt, count in Counter(prompts).items():  # equal prompts are read once
        ids, healed = _as_typed(heal, prompt) if heal else Prompt(list(prompt))
        request = Request(
            tokens=ids,
            healed=healed,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            samples=count,
        )
        samples[prompt] = iter(engine.add(request))
    for _ in engine.run():
        pass  # the samples hold the tokens
    texts = []
    for prompt in prompts:
        sample = next(samples[prompt])
        texts.append(sample.tokens[sample.added :])
    if isinstance(tokens, Tensor):
        written = torch.tensor(texts, dtype=tokens.dtype, device=tokens.device)
        return written.view(len(tokens), tokens.shape[1] + max_new_tokens)  # also where there are no rows
    return texts


def stream_samples(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    sampling: Sampling | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    heal: bool = True,
    backend: BackendName = "auto",
) -> Iterator[tuple[int, str]]:
    """Yield the number of a sample and a piece of its text, up to `<|endoftext|>` or a stop string.

    A piece has only complete characters and never the beginning of a stop string. The prompt is text or ids.
    It is not repeated. An empty one starts a new document. `<|endoftext|>` in a text is plain text.
    `max_new_tokens`, `sampling`, `seed` and `stop` are those of a `Request`, `backend` is that of `Engine`.

    A text may end inside a token, with a space or half a word. It is continued as if it did not, unless
    `heal` is false. Ids are left as they are. Raises the errors of `Engine.add`, of `Request` and of the
    sample that fails.
    """
    check_least(1, num_samples=num_samples)
    end = tokenizer.eot
    if isinstance(prompt, str):
        ids, healed = typed_prompt(tokenizer, prompt) if heal else Prompt(tokenizer.encode(prompt))
    else:
        ids, healed = Prompt(list(prompt))
    engine = Engine(model, tokenizer, backend=backend)
    request = Request(
        tokens=ids or [end],
        healed=healed,
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        seed=seed,
        samples=num_samples,
        end=end,
        stop=stop,
    )
    engine.add(request)
    return ((token.sample.k, token.text) for token in engine.run() if token.text)


def _as_typed(tokenizer: Tokenizer, ids: Sequence[int]) -> Prompt:
    """Return the prompt for ids as if the text of its last document had been typed.

    It is just the ids if the tokenizer gives other ids for this text.
    """
    last_end = max((place for place, id_ in enumerate(ids) if id_ == tokenizer.eot), default=-1)
    document = list(ids[last_end + 1 :])
    text = tokenizer.decode(document)
    if not document or tokenizer.encode(text) != document:
        return Prompt(list(ids))
    return Prompt(list(ids), typed_prompt(tokenizer, text).healed)
