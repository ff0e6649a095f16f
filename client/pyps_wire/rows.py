"""Rows of tables on the wire: ids, and the shard that each belongs to."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def bucket_of(ids: Ids, num_buckets: int, salt: int = 0) -> npt.NDArray[np.uint64]:
    """Return for each id which of a table's shards has its row: Stafford's thirteenth mix of the id, modulo."""
    mixed = ids.view(np.uint64) ^ np.uint64(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) % np.uint64(num_buckets)
