"""A home for users who have none, as in a container: libraries and the cache keep files there."""

import functools
import os
import tempfile

from gpt.progress import notice


def ensure_home() -> None:
    """Where the user has no home, or can write nothing there, let a temporary folder be it, and say so.

    It is also the home of the processes that this one starts. It goes when this process ends.
    """
    home = os.path.expanduser(
        "~"
    )  # stays as it is where neither $HOME nor the system's list of users has one
    if home == "~":
        why = "the user has no home"
    elif not os.access(home, os.W_OK | os.X_OK) and not os.path.isdir(os.path.join(home, ".cache")):
        why = f"{home} cannot be written"
    else:
        return
    os.environ["HOME"] = _temporary().name
    notice(
        f"{why}: what is kept for later runs is in {os.environ['HOME']} and goes at the end; "
        "GPT_CACHE names another folder"
    )


_temporary = functools.cache(functools.partial(tempfile.TemporaryDirectory, prefix="minimal-gpt-"))
