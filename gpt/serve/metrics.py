"""Counts for `/metrics`, in Prometheus' text form (https://prometheus.io/docs/instrumenting/exposition_formats)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate


class Histogram:
    """Counts of durations in seconds, by upper bound."""

    def __init__(self, *bounds: float) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        """Add a duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def values(self) -> dict[str, float]:
        """The counts up to each bound, the sum and the count, by what follows the metric's name."""
        totals = list(accumulate(self.counts))
        bounds = (f'_bucket{{le="{bound}"}}' for bound in (*self.bounds, "+Inf"))
        return {**dict(zip(bounds, totals, strict=True)), "_sum": self.sum, "_count": totals[-1]}


class Metrics:
    """Running totals; for the event loop only."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.prompt_tokens = self.generated_tokens = 0
        slow = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
        self.request_time, self.first_token_time = Histogram(*slow, 300.0), Histogram(*slow)
        self.token_time = Histogram(0.001, 0.0025, 0.005, *slow[:8])

    def text(self, running: int, open_: int) -> str:
        """The page."""
        statuses = {f'{{status="{status}"}}': count for status, count in sorted(self.requests.items())}
        metrics: tuple[tuple[str, str, str, Mapping[str, float]], ...] = (
            ("requests_total", "counter", "Requests by HTTP status; 499: the client disconnected.", statuses),
            ("prompt_tokens_total", "counter", "Prompt tokens received.", {"": self.prompt_tokens}),
            ("generated_tokens_total", "counter", "Tokens generated.", {"": self.generated_tokens}),
            ("running_samples", "gauge", "Completions that are decoded now.", {"": running}),
            ("open_requests", "gauge", "Requests that are decoded or waiting.", {"": open_}),
            ("request_seconds", "histogram", "Time to the end of an answer.", self.request_time.values()),
            ("first_token_seconds", "histogram", "Time to the first token.", self.first_token_time.values()),
            ("token_seconds", "histogram", "Time from one token to the next.", self.token_time.values()),
        )
        lines = []
        for name, kind, purpose, values in metrics:
            lines += [f"# HELP gpt_{name} {purpose}", f"# TYPE gpt_{name} {kind}"]
            lines += [f"gpt_{name}{suffix} {value}" for suffix, value in values.items()]
        return "\n".join(lines) + "\n"
