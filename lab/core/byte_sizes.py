"""Sizes of memory as a user writes them: 500MB, 8GB, 1.5GiB."""

from __future__ import annotations

import re

from lab.errors import LabError

UNITS = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


def parse_size(text: str, option: str) -> int:
    """The bytes of a size. LabError for anything else, or for nothing."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]{0,3})", text.strip().lower())
    if match is None or match[2] not in UNITS:
        raise LabError(f"{option} {text} is no size.", "Write it like 500MB or 8GB.")
    n_bytes = round(float(match[1]) * UNITS[match[2]])
    if n_bytes < 1:
        raise LabError(f"{option} {text} leaves no memory.", "Write it like 500MB or 8GB.")
    return n_bytes
