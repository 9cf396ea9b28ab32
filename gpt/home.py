"""A home folder for users without one, as in containers: libraries and the cache keep files there."""

import functools
import os
import tempfile

from gpt.progress import notice


def ensure_home() -> None:
    """If the user has no writable home, use a temporary folder as home and print so.

    Child processes use it too. It is deleted when this process ends.
    """
    home = os.path.expanduser("~")  # "~" if neither $HOME nor the list of users has one
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
