"""The picture of `gpt plan`."""

from collections.abc import Sequence

from gpt.pictures.figures import save


def draw_plans(plans: Sequence[tuple[float, float, float]], output: str) -> None:
    """Draw plans, (minutes, bits per byte, their standard error): bits per byte over minutes."""
    from matplotlib.figure import Figure

    minutes, bits, errors = zip(*plans, strict=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(minutes, bits, errors, marker="o", capsize=4)
    axes.set(xscale="log", xlabel="minutes", ylabel="bits per byte of held-out text")
    axes.set_xticks(minutes, [f"{time:g}" for time in minutes])
    axes.grid(alpha=0.25)
    save(figure, output)
