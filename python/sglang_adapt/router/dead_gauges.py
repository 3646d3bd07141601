"""Lets go of what an engine that has died said of itself in stock's metrics (`--enable-metrics`).

Each process writes its metrics to files in one folder. A gauge of a dead one (`sglang:num_running_reqs`, ...) would
stay at its last value until the engine has said something anew, and for ever if it was given up. Its counters and
histograms stay: they are part of the totals.
"""

from __future__ import annotations

import struct
from pathlib import Path

_EMPTY = struct.pack("ii", 8, 0)
"""A file of `prometheus_client` without values: the number of bytes that are used, its own, and padding."""


def forget_gauges(folder: Path, pid: int) -> None:
    """Make the files of gauges of a process that has ended empty.

    They are replaced, not removed: whoever has just listed the folder, to answer `/metrics`, still finds them.

    Args:
        folder: of all metrics, PROMETHEUS_MULTIPROC_DIR.
        pid: of the process.
    """
    for file in folder.glob(f"gauge_*_{pid}.db"):
        # Not by a name that is read as metrics.
        empty = file.with_suffix(".empty")
        empty.write_bytes(_EMPTY)
        empty.replace(file)
