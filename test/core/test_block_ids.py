"""Block ids in messages come back as they were, in a bit each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_adapt.core.block_ids import pack_ids, unpack_ids


@given(st.sets(st.integers(0, 5000)))
def test_ids_come_back_ascending_in_a_bit_each(ids: set[int]) -> None:
    data = pack_ids(sorted(ids))
    back = unpack_ids(data)
    assert (back.dtype, back.tolist()) == (np.int32, sorted(ids))
    assert len(data) == (max(ids) // 8 + 1 if ids else 0)


@pytest.mark.parametrize("ids", [[2, 1], [1, 1], [-1, 3]])
def test_what_a_bit_each_cannot_say_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="not ascending"):
        pack_ids(ids)
