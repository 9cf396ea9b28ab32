"""The one exception that a person's mistake raises."""


class InputError(ValueError):
    """What was given cannot be used.

    The message is one line that names what was given and what was expected. The command line prints it
    without a traceback and exits with status 2; a program that uses the package catches a `ValueError`.
    """


def check_least(least: float, **values: float | None) -> None:
    """Raise an InputError that names a value below `least`; None is the option's own default."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise InputError(f"{name} must be at least {least}, got {value}")
