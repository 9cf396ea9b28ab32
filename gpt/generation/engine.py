"""The decoding engine: one batch that samples join and leave at any step (Yu et al. 2022, Orca, section 3.2).

Every step reads the unread tokens of each text: one token of a running sample, or a chunk of a prompt. Then
it adds a token to each sample that has no unread tokens. Samples that run together read their prompt once.

When a text grows past `context_length`, its window moves forward by half a context. The tokens that stay are
read again at positions from 0, because position embeddings are learned for places in the window. So the model
always sees between half a context and a whole one, and a token costs at most about twice as much.
`window_start` is the rule.
"""

import secrets
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import get_args

import torch

from gpt.errors import InputError, check_least
from gpt.generation.cache import Cache
from gpt.generation.decoding import Backend, BackendName, backend_of
from gpt.generation.samples import NOT_FINITE, Beginning, Request, Sample, Token, log_probabilities
from gpt.generation.sampling import sample_tokens
from gpt.model import GPT
from gpt.text.tokenizer import Tokenizer


class Engine:
    """A batch of samples that are decoded together. Not thread-safe.

    With the compiled program, results do not depend on what else is decoded. With PyTorch, logits differ then
    by rounding, and rarely another token is drawn. An error in one sample ends only that one: see `failed`.

    Args:
        model: any GPT; it computes in evaluation mode and is left unchanged.
        tokenizer: turns ids into text, and limits the ids that are drawn to its own. Without it there are
            only ids.
        backend: who computes logits.
        max_samples: how many samples run at a time; others wait.
        chunk: about how many prompt tokens are read in a step. Running samples continue between the chunks.

    Raises:
        InputError: `max_samples` or `chunk` is below 1, the backend is unknown, or the tokenizer has tokens
            that the model lacks.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer | None = None,
        *,
        backend: BackendName = "auto",
        max_samples: int = 64,
        chunk: int = 512,
    ) -> None:
        check_least(1, max_samples=max_samples, chunk=chunk)
        if backend not in get_args(BackendName):
            raise InputError(f"backend {backend!r}: expected one of {', '.join(get_args(BackendName))}")
        self.model = getattr(model, "_orig_mod", model)  # the model inside the wrapper of torch.compile
        self.tokenizer = tokenizer
        self.backend = backend
        self.max_samples = max_samples
        self._chunk = chunk
        rows = self.model.config.vocab_size
        if tokenizer and tokenizer.n_vocab > rows:
            raise InputError(f"the tokenizer has {tokenizer.n_vocab} tokens, and the model only {rows}")
        self._vocab_size = tokenizer.n_vocab if tokenizer else None  # only ids below this have logits
        self.failed: dict[Sample, Exception] = {}  # samples that failed in the last step, with their errors
        self._waiting: list[Sample] = []
        self._rows: list[Sample] = []  # the sample in each row of the cache
        # Chosen when the first sample starts, and kept while any sample runs.
        self._backend: Backend
        self._cache: Cache

    @property
    def busy(self) -> bool:
        """Whether there is work for a further step."""
        return bool(self._waiting or self._rows)

    def add(self, request: Request) -> list[Sample]:
        """Add a request and return its samples. The next steps give them their tokens.

        Raises InputError for a token id outside the vocabulary, for an empty stop string, and for tokens that
        are to be healed by an engine without a tokenizer. Tokens that are echoed have to be the tokenizer's.
        """
        if request.healed and self.tokenizer is None:
            raise InputError("tokens can be healed only by an engine with a tokenizer")
        size = self.model.config.vocab_size
        if request.echo and self._vocab_size:
            size = min(size, self._vocab_size)
        for id_ in request.tokens:
            if not 0 <= id_ < size:
                raise InputError(f"token id {id_} is outside the vocabulary of vocab_size {size}")
        seed = secrets.randbits(64) if request.seed is None else request.seed
        context_length = self.model.config.context_length
        beginning = Beginning(request, self.tokenizer)
        samples = [Sample(beginning, k, seed, self.tokenizer, context_length) for k in range(request.samples)]
        self._waiting += samples
        return samples

    @torch.inference_mode()
    def cancel(self, sample: Sample) -> None:
        """End a sample now. Nothing happens if it has ended already."""
        if not sample.finished:
            self._end(sample, "cancelled")

    def run(self) -> Iterator[Token]:
        """Yield all tokens of all samples. Raise the error of a sample that fails."""
        while self.busy:
            yield from self.step()
            for error in self.failed.values():
                raise error

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """Start samples that wait, read, and add a token to every sample that has no unread tokens."""
        self.failed = {}
        if not self.busy:
            return []
        self._admit()
        self._read(list(self._rows))
        ready = [sample for sample in self._rows if not sample.unread]
        tokens: list[Token] = []
        for sample, id_ in zip(ready, self._draw(ready), strict=True):
            try:
                tokens += self._add(sample, id_)
            except Exception as error:
                self._fail(sample, error)
        return tokens

    def _admit(self) -> None:
        """Give rows to waiting samples. The first sample of a request reads the prompt, others copy it."""
        if not self._rows:
            self._backend = backend_of(self.model, self.backend)
            self._cache = Cache(self.model.config, self._backend.like)
        twins: dict[Request, Sample] = {}  # the first sample of each request that has a row
        for running in self._rows:
            twins.setdefault(running.request, running)
        for sample in list(self._waiting):
            if len(self._rows) == self.max_samples:
                break
            twin = twins.get(sample.request)
            if twin and twin.unread > 1:
                continue  # it waits until the prompt is read
            self._waiting.remove(sample)
            self._rows.append(sample)
            twins.setdefault(sample.request, sample)
            self._cache.reserve(len(self._rows), 0)
            if twin and twin.start == 0:  # its window has not moved
                sample.copy(twin)
                self._cache.copy(self._rows.index(twin), len(self._rows) - 1, sample.held)

    def _read(self, samples: Sequence[Sample]) -> None:
        """Read the next tokens of each sample in one call.

        If that fails, read each sample separately, so that an error ends only the sample that causes it.
        """
        reads = []
        budget = self._chunk
        for sample in samples:
            read = sample.next_read(self._rows.index(sample), max(1, budget))
            budget -= len(read.tokens) - read.held - 1
            reads.append(read)
        try:
            self._cache.reserve(0, max(len(read.tokens) for read in reads))
            logits = self._backend.read(reads, self._cache)[:, : self._vocab_size]
            logits_of_reads = torch.split(logits, [read.scored for read in reads])
            for sample, read, scored in zip(samples, reads, logits_of_reads, strict=True):
                sample.take(read, scored)
        except Exception as error:
            for sample in samples:
                if len(samples) == 1:
                    self._fail(sample, error)
                elif sample.unread:
                    self._read([sample])

    def _draw(self, samples: Sequence[Sample]) -> list[int]:
        """Draw a token for each sample; -1 where the logits are not finite."""
        drawn: list[int] = []
        for sampling, group in groupby(samples, lambda sample: sample.request.sampling):
            batch = list(group)
            is_penalized = sampling.repetition_penalty != 1
            ids = sample_tokens(
                torch.cat([sample.allowed_logits() for sample in batch]).float(),
                sampling,
                seen=torch.stack([sample.seen() for sample in batch]) if is_penalized else None,
                numbers=torch.tensor([next(sample.numbers) for sample in batch]),
            )
            drawn += ids.tolist()
        return drawn

    def _add(self, sample: Sample, id_: int) -> list[Token]:
        """Add a token to a sample, unless only its prompt is requested. End the sample if it is complete.

        Raises InputError for an `id_` below 0, which stands for logits that are not finite.
        """
        request = sample.request
        if id_ < 0:
            raise InputError(NOT_FINITE)
        if request.max_new_tokens == 0:
            tokens = sample.echo_prompt()
        else:
            logprobs = None
            if request.alternatives is not None:
                (logprobs,) = log_probabilities(sample.logits, [id_], request.alternatives)
            tokens = sample.add(id_, logprobs)
        if sample.finished:
            self._end(sample, sample.finished)
        return tokens

    def _fail(self, sample: Sample, error: Exception) -> None:
        self.failed[sample] = error
        self._end(sample, "error")

    def _end(self, sample: Sample, reason: str) -> None:
        """End a sample. The sample of the last row moves into its row."""
        sample.end(reason)
        if sample in self._waiting:
            self._waiting.remove(sample)
            return
        row = self._rows.index(sample)
        last = self._rows.pop()
        if last is not sample:
            self._cache.copy(len(self._rows), row, last.held)
            self._rows[row] = last
        self._cache.store[:, :, len(self._rows)] = 0  # a mask would not hide NaN that is left in the row
