"""Counts for `/metrics`, in Prometheus' text form (https://prometheus.io/docs/instrumenting/exposition_formats)."""

from collections import Counter

_HELP = {
    "gpt_requests_total": (
        "counter",
        "Completion requests by HTTP status; 499 means that the client disconnected.",
    ),
    "gpt_prompt_tokens_total": ("counter", "Prompt tokens received."),
    "gpt_generated_tokens_total": ("counter", "Tokens generated."),
    "gpt_request_seconds": ("summary", "Time from a request to the end of its answer."),
    "gpt_first_token_seconds": ("summary", "Time from a request to its first token."),
    "gpt_running_samples": ("gauge", "Completions that are decoded now."),
    "gpt_open_requests": ("gauge", "Requests that are decoded or waiting."),
}


class Metrics:
    """Running totals; for the event loop only."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.prompt_tokens = self.generated_tokens = 0
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def observe(self, name: str, seconds: float) -> None:
        """Add to a summary."""
        self._sums[name] += seconds  # type: ignore[assignment]
        self._counts[name] += 1

    def text(self, running: int, open_: int) -> str:
        """The page."""
        values = {
            "gpt_requests_total": {f'{{status="{s}"}}': n for s, n in sorted(self.requests.items())},
            "gpt_prompt_tokens_total": {"": self.prompt_tokens},
            "gpt_generated_tokens_total": {"": self.generated_tokens},
            "gpt_running_samples": {"": running},
            "gpt_open_requests": {"": open_},
        }
        for name in ("gpt_request_seconds", "gpt_first_token_seconds"):
            values[name] = {"_sum": self._sums[name], "_count": self._counts[name]}
        lines = []
        for name, (kind, purpose) in _HELP.items():
            lines += [f"# HELP {name} {purpose}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{label} {value}" for label, value in values[name].items()]
        return "\n".join(lines) + "\n"
