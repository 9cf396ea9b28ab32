"""The decoding engine: one batch that samples join and leave at any step (Yu et al. 2022, Orca, section 3.2).

Every step reads the tokens of each text that were not read: one of a running sample, a chunk of a prompt.
Then it adds a token to each sample whose text is read, on a GPU several. A prompt is read once for all of its
samples.
When a text grows past `context_length`, its window moves forward by half a context: the rest is read again at
positions from 0, because positions are learned for places in the window. So the model always sees between
half a context and a whole one, and a token costs at most about twice as much. `window_start` is the rule.

Shapes: N running samples, V vocab_size.
"""

import copy
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from gpt.errors import InputError
from gpt.generation.cache import Cache
from gpt.generation.decoding import Way, decoder_of
from gpt.generation.forward import Forward, to_device
from gpt.generation.sampling import sample_tokens
from gpt.generation.text import TextStream
from gpt.generation.texts import UNSCORED, Request, Sample, Score, Text, Token, scores
from gpt.model import GPT
from gpt.text.tokenizer import Tokenizer

_AHEAD = 8  # tokens that a GPU computes before the host waits for them, to end texts and to write them
_NOT_FINITE = "the model's logits are not finite: its weights are damaged, use an earlier checkpoint"


class Engine:
    """Decodes requests together. Not thread-safe.

    Results do not depend on what else is decoded: where the compiled program computes they are equal bit for
    bit, where PyTorch does logits are close. An error in one sample ends only that sample: see `failed`.

    Args:
        model: any GPT; it computes in evaluation mode and is left unchanged.
        tokenizer: also write text; without it there are ids only. No ids beyond its own are drawn.
        max_samples: how many samples run at a time, and the last one of a prompt with more; others wait.
        chunk: a prompt is read in chunks of this many tokens, and running samples go on in between.
        graphs: on a GPU, decode by CUDA graphs.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer | None = None,
        *,
        max_samples: int = 64,
        chunk: int = 512,
        graphs: bool = True,
    ) -> None:
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper computes what is in it
        self.model, self.tokenizer, self.max_samples = model, tokenizer, max_samples
        most = model.config.vocab_size
        self.vocab_size = min(most, tokenizer.n_vocab) if tokenizer else most  # of the ids that are drawn
        self.failed: dict[Sample, Exception] = {}  # those that ended with an error in the last step
        self._waiting: deque[Text] = deque()
        self._rows: list[Text] = []  # those with a row of the cache
        self._chunk, self._graphs, self._decoder = chunk, graphs, decoder_of(model)
        # What computes all texts of now, so that none changes over, and into which memory.
        self._way: Way
        self._cache: Cache
        self._device = next(model.parameters()).device
        self._ahead = _AHEAD if self._device.type == "cuda" else 1

    @property
    def busy(self) -> bool:
        """Whether there is work for another step."""
        return bool(self._waiting or self._rows)

    @property
    def running(self) -> int:
        """How many samples are decoded now."""
        return sum(text.runs for text in self._rows)

    def add(self, request: Request) -> list[Sample]:
        """Add a request; its samples get their tokens from the next steps.

        InputError for what is no token id of the vocabulary, or an empty stop string.
        """
        biased = [id_ for id_, _ in request.sampling.logit_bias]
        for ids, size in ((request.tokens, self.model.config.vocab_size), (biased, self.vocab_size)):
            if outside := [id_ for id_ in ids if not (hasattr(id_, "__index__") and 0 <= id_ < size)]:
                raise InputError(f"token id {outside[0]} is outside the vocabulary of vocab_size {size}")
        seed = random.SystemRandom().getrandbits(64) if request.seed is None else request.seed
        samples = []
        for k in range(request.samples):
            text = TextStream(self.tokenizer, request.stop) if self.tokenizer else None
            samples.append(Sample(request, k, list(request.tokens), random.Random(f"{seed}/{k}"), text))
        if request.max_new_tokens == 0 and not request.echo:
            for sample in samples:
                sample.finished = "length"
            return samples
        if not self.busy:
            self._way = self._decoder.way(self.model, self._graphs)
            kept = self._decoder.caches
            self._cache = kept.pop() if kept else Cache(self.model.config, self._way.like)
        self._waiting.append(Text(samples, self.model.config.context_length))
        return samples

    @torch.inference_mode()
    def cancel(self, sample: Sample) -> None:
        """End a sample now; nothing happens if it has ended."""
        for text in (*self._rows, *self._waiting):
            if sample in text.samples:
                self._end(text, sample, "cancelled")

    def run(self) -> Iterator[Token]:
        """Yield all tokens of all samples, and raise the error of one that fails."""
        while self.busy:
            yield from self.step()
            for error in self.failed.values():
                raise error

    @torch.inference_mode()
    def step(self) -> list[Token]:
        """Add a token to every running sample, or several on a GPU, and start those that wait for a row."""
        self.failed = {}
        if not self.busy:
            return []
        if self._waiting and len(self._rows) < self.max_samples:
            self._admit()
        steps, budget, unread = self._steps(), self._chunk, []
        for text in self._rows:
            if text.runs or (text.unread and budget > 0):
                unread.append(text)
                budget -= text.unread - 1
        if unread:
            self._read(unread)
        for text in list(self._rows):
            while len(text.samples) > 1 and not text.unread and len(self._rows) <= self.max_samples:
                self._fork(text)
        ready = [text for text in self._rows if len(text.samples) == 1 and not text.unread]
        drawn = [self._draw(ready)] if ready else []
        while 0 < len(drawn) < steps:
            self._append(ready, drawn[-1])
            drawn.append(self._draw(ready))
        rows = torch.stack(drawn).tolist() if drawn else []  # the host waits once
        tokens = [token for ids in rows for token in self._add(ready, ids)]
        if self._way.graphs and not (self._waiting or self._rows):
            self._decoder.caches.append(self._cache)
        return tokens

    def _steps(self) -> int:
        """How many tokens to add before the host reads them."""
        if self._ahead == 1:
            return 1
        requests = [text.sample.request for text in self._rows]
        each = any(one.sampling.looks_back or one.alternatives is not None for one in requests)
        by_forward = isinstance(self._way, Forward) and self._way.cached
        if each or self.running < len(self._rows) or not by_forward:
            return 1
        places = self.model.config.context_length - max(text.held for text in self._rows)
        left = max(text.sample.request.max_new_tokens - text.sample.new_tokens for text in self._rows)
        return math.ceil(min(self._ahead, places, left))

    def _admit(self) -> None:
        """Give rows to those that wait, and have memory for all samples there are, copied once."""
        soon = [*self._rows, *self._waiting]
        samples = sum(len(text.samples) for text in soon)
        most = self.max_samples + 1  # a text whose samples wait keeps its row
        self._cache.reserve(min(samples, most), max(text.columns for text in soon))
        while self._waiting and len(self._rows) < self.max_samples:
            self._place(self._waiting.popleft())

    def _place(self, text: Text) -> None:
        """Give a text the next row."""
        text.row = len(self._rows)
        self._rows.append(text)

    def _fork(self, text: Text) -> None:
        """Give one of several samples its own row."""
        one = copy.copy(text)
        one.samples = deque([text.samples.popleft()])
        self._place(one)
        self._cache.reserve(len(self._rows), 0)
        self._cache.copy(text.row, one.row, text.held)

    def _read(self, texts: Sequence[Text]) -> None:
        """Read the next part of each at once; where that fails, each alone: an error ends one text."""
        try:
            parts = [text.part(self._chunk, self._way.cached) for text in texts]
            self._cache.reserve(len(self._rows), max(part.held + len(part.tokens) for part in parts))
            found = torch.split(self._way.read(parts, self._cache), [part.scored for part in parts])
            for text, part, logits in zip(texts, parts, found, strict=True):
                text.take(part, logits)
        except Exception as error:
            for text in texts:
                if len(texts) == 1:
                    self._fail(text, error)
                elif text.unread:
                    self._read([text])

    def _append(self, texts: Sequence[Text], ids: Tensor) -> None:
        """Read what was drawn, (N,), without the host."""
        assert isinstance(self._way, Forward)
        held = [text.held for text in texts]
        self._cache.reserve(0, max(held) + 1)
        for text, logits in zip(texts, self._way.append(ids[:, None], held, self._cache), strict=True):
            text.read, text.logits = text.read + 1, logits

    def _draw(self, texts: Sequence[Text]) -> Tensor:
        """Draw a token for each: ids (N,), -1 where the logits are not finite."""
        drawn = []
        for sampling, group in groupby(texts, lambda text: text.sample.request.sampling):
            some = list(group)
            samples = [text.sample for text in some]
            ids = sample_tokens(
                torch.cat([text.logits for text in some])[:, : self.vocab_size].float(),
                sampling,
                seen=[sample.tokens for sample in samples],
                numbers=to_device([one.random.random() for one in samples], self._device, torch.float32),
                prompt_lengths=[len(sample.request.tokens) for sample in samples],
            )
            drawn.append(ids.to(self._device))
        return torch.cat(drawn)

    def _add(self, texts: Sequence[Text], ids: Sequence[int]) -> list[Token]:
        """Add a token to each sample that has not ended, and end those that are complete."""
        tokens: list[Token] = []
        for text, id_ in zip(texts, ids, strict=True):
            if not text.samples:
                continue
            sample, wanted, score = text.sample, text.sample.request.alternatives, UNSCORED
            if sample.request.echo and not sample.new_tokens:
                tokens += [self._token(sample, place, score) for place, score in enumerate(text.scores)]
            if not sample.finished and id_ < 0:
                self._fail(text, InputError(_NOT_FINITE))
            elif not sample.finished:
                sample.tokens.append(id_)
                if wanted is not None:
                    (score,) = scores(text.logits[:, : self.vocab_size], [id_], wanted)
                tokens.append(self._token(sample, len(sample.tokens) - 1, score))
                text.slide()
            if sample.finished and text.samples:
                self._end(text, sample, sample.finished)
        return tokens

    def _token(self, sample: Sample, place: int, score: Score) -> Token:
        """A token of a sample with its text, which may end there."""
        request, id_ = sample.request, sample.tokens[place]
        new, text = place + 1 - len(request.tokens), ""
        if new > 0 and id_ == request.end:
            sample.finished = "stop"
        elif new >= request.max_new_tokens:
            sample.finished = "length"
        if sample.text:
            text = sample.text.feed(id_, echoed=new <= 0)
            if sample.text.stopped:
                sample.finished = "stop"
            if sample.finished:
                text += sample.text.close()
        return Token(sample, id_, text, *score, finished=sample.finished, echoed=new <= 0)

    def _fail(self, text: Text, error: Exception) -> None:
        for sample in list(text.samples):
            self.failed[sample] = error
            self._end(text, sample, "error")

    def _end(self, text: Text, sample: Sample, reason: str) -> None:
        """End a sample; the last of a text leaves its row, and the last row takes its number."""
        sample.finished = reason
        text.samples.remove(sample)
        if text.samples:
            return
        if text in self._waiting:
            self._waiting.remove(text)
            return
        last = self._rows.pop()
        if last is not text:
            self._cache.copy(last.row, text.row, last.held)
            last.row, self._rows[text.row] = text.row, last
        self._cache.clear(len(self._rows))
