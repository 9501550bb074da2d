"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
"""Of memory, by powers of 1024."""


def binary_power(size: float) -> int:
    """Index of the binary unit in which a size is readable."""
    return min(int(math.log2(size)) // 10, 4) if size >= 1024 else 0


def readable_bytes(size: float) -> str:
    """Bytes with a binary unit: ``1.2 GiB``."""
    power = binary_power(size)
    size /= 1024**power
    return f"{size:.{0 if size >= 100 or not power else 1}f} {BINARY_UNITS[power]}"


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


@dataclass(frozen=True)
class TimeUnit:
    """One unit and one precision for all times that are compared with each other."""

    name: str
    seconds: float
    digits: int

    @classmethod
    def of(cls, seconds: float | None) -> TimeUnit:
        """The unit in which this time has three digits or so."""
        seconds = seconds if is_number(seconds) and seconds > 0 else 1.0
        name, unit = next(
            ((name, unit) for name, unit in (("s", 1.0), ("ms", 1e-3)) if seconds >= 0.9995 * unit), ("us", 1e-6)
        )
        return cls(name, unit, max(0, 2 - math.floor(math.log10(seconds / unit * 1.0005))))

    def write(self, seconds: float | None) -> str:
        """A time with its unit: ``4.21 s``, ``312 ms``."""
        return f"{self.number(seconds)} {self.name}" if is_number(seconds) else "?"

    def number(self, seconds: float | None) -> str:
        """The time without its unit."""
        if not is_number(seconds):
            return "?"
        amount = seconds / self.seconds
        return f"{amount:,.{self.digits if abs(amount) < 1000 else 0}f}"


def step_time(seconds: float | None) -> str:
    """A step's time with three digits: ``125 us``, ``31.2 ms``, ``4.21 s``, ``1,004 s``."""
    return TimeUnit.of(seconds).write(seconds)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def share_of(part: float, whole: float) -> str:
    """A share in percent; what is more than nothing is never written as 0%."""
    share = part / whole if whole else 0.0
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def difference(share: float | None) -> str:
    """How much longer, relatively: ``+4.5%``, ``-0.3%``, from twice as long on ``x 2.4``."""
    if not is_number(share):
        return "?"
    if share < 0.9995:
        return f"{share:+.1%}"
    return f"x {1 + share:.1f}" if share < 8.95 else f"x {1 + share:,.0f}"


def of_limit(size: float | None, limit: float | None) -> str:
    """Memory of what there is: ``61.2 GiB of 74.0 GiB, 83%``."""
    if not is_number(size):
        return "?"
    if not is_number(limit) or not limit:
        return readable_bytes(size)
    return f"{readable_bytes(size)} of {readable_bytes(limit)}, {share_of(size, limit)}"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun: ``1 way``, ``1,024 ways``, ``8 microbatches``."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def joined(*parts: str) -> str:
    """What is not empty, with dots between."""
    return " · ".join(part for part in parts if part)


def wrapped(phrases: Iterable[str], fits: Callable[[str], bool]) -> list[str]:
    """Phrases with commas between, in lines that fit; one that does not fit alone has a line of its own."""
    lines: list[str] = []
    for phrase in phrases:
        if lines and fits(f"{lines[-1]}, {phrase},"):
            lines[-1] += f", {phrase}"
        else:
            lines.append(phrase)
    return [*(f"{line}," if fits(f"{line},") else line for line in lines[:-1]), *lines[-1:]]
