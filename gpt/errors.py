"""Raised for invalid user input."""


class InputError(ValueError):
    """What was given cannot be used. The command line prints the one line and exits with status 2."""


def check_least(least: float, **values: float | None) -> None:
    """Raise an InputError that names a value below `least`; None is the option's own default."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise InputError(f"{name} must be at least {least}, got {value}")
