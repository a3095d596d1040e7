"""How far a session of claims is: which part of how many is measured, and how long all of them will still take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from lab.experiments.claim_parts import PARTS
from lab.runner.progress import ShowStatus, Status

SURE_S = 60.0
"""Seconds of measuring that the expectation counts for, when it is corrected by what parts took."""


class Progress:
    """Turns the statuses of runs into those of the session, of which `expected_s` says what each part is to take.

    What parts are expected to take is corrected by what those before them took.
    """

    def __init__(self, expected_s: Mapping[str, float], watch: ShowStatus) -> None:
        self.expected_s = dict(expected_s)
        self._watch = watch
        self._done: dict[str, float] = {}  # seconds that parts took
        self._words = ""
        self._name = ""
        self._began = self._started = time.monotonic()

    def begin(self, name: str) -> str:
        """A part begins; a line that says so."""
        self._name, self._began = name, time.monotonic()
        number = 1 + list(self.expected_s).index(name)
        self._words = f"part {number} of {len(self.expected_s)}, {name}"
        what = PARTS[name].what if name in PARTS else "what the machine can do at best, kernel by kernel"
        return f"{self._words}: {what}"

    def end(self, name: str) -> None:
        """A part has ended."""
        self._done[name] = time.monotonic() - self._began

    def watch(self, status: Status) -> None:
        """Report the status of a run as one of the whole session."""
        taken = time.monotonic() - self._began
        own = status.left_s if status.left_s is not None else max(0.0, self._pace * self.expected_s[self._name] - taken)
        later = sum(s for name, s in self.expected_s.items() if name not in self._done and name != self._name)
        self._watch(
            dataclasses.replace(
                status,
                part=self._words,
                elapsed_s=time.monotonic() - self._started,
                left_s=own + self._pace * later,
            )
        )

    @property
    def _pace(self) -> float:
        """What parts took over what they were expected to take, so far; the first ones say little of it."""
        expected = sum(self.expected_s[name] for name in self._done)
        return (SURE_S + sum(self._done.values())) / (SURE_S + expected)
