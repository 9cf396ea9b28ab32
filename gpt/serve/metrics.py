"""Counts for `/metrics`, in Prometheus' text form (https://prometheus.io/docs/instrumenting/exposition_formats)."""

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

_TYPES = {
    "gpt_requests_total": ("counter", "Requests by HTTP status; 499 means that the client disconnected."),
    "gpt_prompt_tokens_total": ("counter", "Prompt tokens received."),
    "gpt_generated_tokens_total": ("counter", "Tokens generated."),
    "gpt_running_samples": ("gauge", "Completions that are decoded now."),
    "gpt_open_requests": ("gauge", "Requests that are decoded or waiting."),
}


class Histogram:
    """Counts of durations in seconds, by upper bound."""

    def __init__(self, purpose: str, *bounds: float) -> None:
        self.purpose, self.bounds = purpose, bounds
        self.counts, self.sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        """Add a duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> list[str]:
        """The lines of `/metrics`."""
        bounds = [*map(str, self.bounds), "+Inf"]
        totals = list(accumulate(self.counts))
        buckets = [
            f'{name}_bucket{{le="{bound}"}} {total}' for bound, total in zip(bounds, totals, strict=True)
        ]
        return [
            *_head(name, "histogram", self.purpose),
            *buckets,
            f"{name}_sum {self.sum}",
            f"{name}_count {totals[-1]}",
        ]


class Metrics:
    """Running totals; for the event loop only."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.prompt_tokens = self.generated_tokens = 0
        slow = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
        fast = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
        self.request_time = Histogram("Time from a request to the end of its answer.", *slow, 300.0)
        self.first_token_time = Histogram("Time from a request to its first token.", *slow)
        self.token_time = Histogram("Time from one token of a completion to the next.", *fast)

    def text(self, running: int, open_: int) -> str:
        """The page."""
        statuses = {f'{{status="{status}"}}': count for status, count in sorted(self.requests.items())}
        values = (statuses, {"": self.prompt_tokens}, {"": self.generated_tokens}, {"": running}, {"": open_})
        lines = []
        for (name, (kind, purpose)), labelled in zip(_TYPES.items(), values, strict=True):
            lines += [
                *_head(name, kind, purpose),
                *(f"{name}{label} {value}" for label, value in labelled.items()),
            ]
        lines += self.request_time.lines("gpt_request_seconds")
        lines += self.first_token_time.lines("gpt_first_token_seconds")
        lines += self.token_time.lines("gpt_token_seconds")
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, purpose: str) -> list[str]:
    return [f"# HELP {name} {purpose}", f"# TYPE {name} {kind}"]
