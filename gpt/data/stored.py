"""The tokens in a file. Only this module knows how one that is not scored is marked.

Ids of plain text are little-endian uint16. Those of examples are int32, and a token that is not scored, such
as one of a prompt, is stored as the complement of its id, ~id, which is below 0. Arrays have any shape.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

StoredType: TypeAlias = np.dtype[np.uint16 | np.int32]
Stored: TypeAlias = NDArray[np.uint16 | np.int32]
"""Tokens as a file holds them."""


def token_dtype(examples: bool) -> StoredType:
    """Return the type in which the ids of examples, or of plain text, are stored."""
    if examples:
        return np.dtype("<i4")
    return np.dtype("<u2")


def as_unscored(ids: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return the ids as tokens of an example that are not scored."""
    return ~ids.astype(np.int64)


def token_ids(stored: Stored) -> NDArray[np.int64]:
    """Return the ids of stored tokens, both scored and not scored."""
    ids = stored.astype(np.int64)
    return np.maximum(ids, ~ids) if may_be_unscored(stored) else ids


def largest_id(stored: Stored) -> int:
    """Return the largest id of stored tokens, both scored and not scored; 0 if there are none."""
    largest = int(stored.max(initial=0))
    return max(largest, ~int(stored.min(initial=0))) if may_be_unscored(stored) else largest


def is_scored(stored: Stored) -> NDArray[np.bool_]:
    """Whether each of the stored tokens is scored."""
    return stored >= 0


def may_be_unscored(stored: Stored) -> bool:
    """Whether tokens of this type may be marked as not scored. Those of plain text are all scored."""
    return stored.dtype.kind == "i"
