# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them, pure."""

_PREFIXES = ("", "k", "M", "G", "T", "P")


def bytes_text(size: float) -> str:
    """Return bytes as ``999 B``, ``1.23 kB``, ``45.6 GB``: powers of 1000, three digits."""
    number, prefix = _scaled(size)
    return f"{number} {prefix}B"


def count_text(count: float) -> str:
    """Return a number as ``999``, ``1.23 M``: powers of 1000, three digits."""
    return " ".join(_scaled(count)).rstrip()


def _scaled(number: float) -> tuple[str, str]:
    for prefix in _PREFIXES[:-1]:
        if abs(number) < 999.5:
            return f"{number:.3g}", prefix
        number /= 1000
    return f"{number:.3g}", _PREFIXES[-1]
