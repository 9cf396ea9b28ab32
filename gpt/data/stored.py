"""How a file holds tokens. Only this module knows how a token that is not scored is marked.

Ids of plain text are little-endian uint16. Those of examples are int32, and a token that is not scored, such
as one of a prompt, is stored as the complement of its id, ~id, which is below 0. Arrays have any shape.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def token_dtype(examples: bool) -> np.dtype[Any]:
    """The type in which the ids of examples, or of plain text, are stored."""
    return np.dtype("<i4" if examples else "<u2")


def as_unscored(ids: NDArray[Any]) -> NDArray[np.int64]:
    """The ids as tokens of an example that are not scored."""
    return ~ids.astype(np.int64)


def token_ids(stored: NDArray[Any]) -> NDArray[np.int64]:
    """The ids of stored tokens, both scored and not scored."""
    ids = stored.astype(np.int64)
    return np.maximum(ids, ~ids) if may_be_unscored(stored) else ids


def is_scored(stored: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each of the stored tokens is scored."""
    return stored >= 0


def may_be_unscored(stored: NDArray[Any]) -> bool:
    """Whether tokens of this type may be marked as not scored. Those of plain text are all scored."""
    return stored.dtype.kind == "i"
