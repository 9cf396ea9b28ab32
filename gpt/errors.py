"""The error for invalid user input."""


class InputError(ValueError):
    """An error of the given input. The command line prints its one line and exits with status 2."""


def check_least(least: float, **values: float | None) -> None:
    """Raise an InputError that names a value below `least`; None stands for an option that is not set."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise InputError(f"{name} must be at least {least}, got {value}")
