"""Files of the operating system in /proc and /sys, which may be missing or closed to this user."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def system_text(path: str | Path) -> str:
    """A system file's text; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def system_number(path: Path) -> int | None:
    """The non-negative integer in a system file, if any."""
    text = system_text(path).strip()
    if not text.isdecimal():
        return None
    return int(text)
