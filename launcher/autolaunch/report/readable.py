"""Numbers as people read them."""

from __future__ import annotations

import math


def readable_bytes(size: float) -> str:
    """Bytes with a binary unit: ``1.2 GiB``."""
    if size < 1024:
        return f"{size:.0f} B"
    power = min(int(math.log2(size)) // 10, 4)
    size /= 1024**power
    return f"{size:.{0 if size >= 100 else 1}f} {('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def readable_count(count: float) -> str:
    """A count with three significant digits or so: ``812``, ``9,431``, ``43.1k``, ``1.24B``."""
    if count < 10_000:
        return f"{count:,.0f}"
    power = min(int(math.log10(count * 1.0005)) // 3, 4)  # 999,700 is 1.00M, not 1000k
    count /= 1000**power
    digits = max(0, 2 - int(math.log10(count * 1.0005)))
    return f"{count:.{digits}f}{('', 'k', 'M', 'B', 'T')[power]}"


def readable_seconds(seconds: float) -> str:
    """A duration: ``0.0312 s``, ``4.21 s``, ``41 s``, ``12 min 5 s``, ``3 h 20 min``."""
    if seconds < 1:
        return f"{seconds:.3g} s"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
