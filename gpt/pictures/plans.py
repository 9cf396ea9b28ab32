"""The picture of `gpt plan`."""

from collections.abc import Sequence

from gpt.pictures.figures import save


def draw_plans(minutes: Sequence[float], bits: Sequence[float], errors: Sequence[float], output: str) -> None:
    """Bits per byte over minutes, with the standard errors of the predictions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(minutes, bits, errors, marker="o", capsize=4)
    axes.set(xscale="log", xlabel="minutes", ylabel="bits per byte of held-out text")
    axes.set_xticks(minutes, [f"{time:g}" for time in minutes])
    axes.grid(alpha=0.25)
    save(figure, output)
