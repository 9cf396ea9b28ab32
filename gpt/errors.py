"""The one exception that a person's mistake raises."""


class InputError(ValueError):
    """What was given cannot be used.

    The message is one line that names what was given and what was expected. The command line prints it
    without a traceback and exits with status 2; a program that uses the package catches a `ValueError`.
    """
