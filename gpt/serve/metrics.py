"""Totals for `/metrics`, in Prometheus' text form (https://prometheus.io/docs/instrumenting/exposition_formats)."""

from collections import Counter

_MEANINGS = {
    "requests_total": "counter Requests by HTTP status; 499: the client disconnected.",
    "prompt_tokens_total": "counter Prompt tokens received.",
    "generated_tokens_total": "counter Tokens generated.",
    "running_samples": "gauge Completions that are decoded now.",
    "open_requests": "gauge Requests that are decoded or waiting.",
    "request_seconds": "summary Time to the end of an answer.",
    "first_token_seconds": "summary Time to the first token.",
    "token_seconds": "summary Time from one token to the next.",
}


class Metrics:
    """Running totals by name and what follows it; for the event loop only."""

    def __init__(self) -> None:
        self.values: dict[str, Counter[str]] = {name: Counter() for name in _MEANINGS}

    def add(self, name: str, value: float, suffix: str = "") -> None:
        """Add to a counter."""
        self.values[name][suffix] += value  # type: ignore[assignment]

    def count(self, status: int) -> None:
        """Add a request."""
        self.add("requests_total", 1, f'{{status="{status}"}}')

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration to a summary."""
        self.add(name, seconds, "_sum")
        self.add(name, 1, "_count")

    def text(self, **gauges: int) -> str:
        """The page, with the gauges as they are now."""
        lines = []
        for name, meaning in _MEANINGS.items():
            kind, _, purpose = meaning.partition(" ")
            lines += [f"# HELP gpt_{name} {purpose}", f"# TYPE gpt_{name} {kind}"]
            values = {"": gauges[name]} if name in gauges else self.values[name]
            lines += [f"gpt_{name}{suffix} {value}" for suffix, value in sorted(values.items())]
        return "\n".join(lines) + "\n"
