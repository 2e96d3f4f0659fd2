# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them, pure."""

_PREFIXES = ("", "k", "M", "G", "T", "P")


def bytes_text(size: float) -> str:
    """Return bytes as ``999 B``, ``1.23 kB``, ``45.6 GB``: powers of 1000, three digits."""
    return f"{_scaled(size)}B"


def count_text(number: float) -> str:
    """Return a number as ``999``, ``1.23 M``: powers of 1000, three digits."""
    return _scaled(number).rstrip()


def _scaled(number: float) -> str:
    value, prefix = float(number), 0
    while abs(value) >= 999.5 and prefix + 1 < len(_PREFIXES):
        value /= 1000
        prefix += 1
    if prefix == 0 and value == int(value):
        return f"{int(value)} "
    digits = max(0, 2 - len(str(int(abs(value)))) + 1)
    return f"{value:.{digits}f} {_PREFIXES[prefix]}"
