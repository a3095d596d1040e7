"""What llama-server's log says about the requests that it served: slots, how each was chosen, and
what its cache lost.

    log = ServerLog(Path("llama-server.log"))
    served = log.find(n_computed=84, prefill_ms=1466.61)

A line is `slot NAME: id SLOT | task TASK | TEXT` or `srv NAME: TEXT`, with a time and a level in
front in newer versions. Of a request only these numbers are taken; its text is not in the log.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

SIMILAR = "similarity"
OLDEST = "least recently used"
CHOSEN = "id_slot"
WAIT_S = 0.5  # for the lines of a request that has just ended
LOOK_S = 0.05
PRINTED_MS = 0.01  # the log has two digits after the point
MOST_BYTES = 1 << 26  # that are read at once

SLOT_LINE = re.compile(r"slot\s+[^:]*:\s*id\s+(\d+) \| task (-?\d+) \|\s?(.*)")
SIMILARITY = re.compile(
    r"selected slot by LCP similarity, (?:f_)?sim(?:_best)? = ([\d.]+)"
    r"(?: \(> ([\d.]+) thold\))?(?:, f_keep = ([\d.]+))?"
)
PREFILL = re.compile(r"prompt eval time =\s*([\d.]+) ms /\s*(\d+) tokens")
CACHE_TYPES = re.compile(r"\bK \((\w+)\):.*\bV \((\w+)\):")
DROPPED = ("cache size limit reached", "exceeds cache size limit")
DROPPED_TOKENS = re.compile(r"cache token limit.*reached")
LOADING = re.compile(r"loading model '|load_model: loading model|initializing slots, n_slots")
FORCED = "forcing full prompt re-processing"
SHIFTED = "slot context shift"


@dataclass(frozen=True)
class Served:
    """A request as the server served it."""

    slot: int | None  # None: not seen
    task: int | None
    start: int = 0  # of the server, counted
    n_dropped: int = 0  # prompts that the server's cache had dropped by then
    chosen_by: str | None = None
    similarity: float | None = None  # of the slot's prompt, as a share of the request's
    is_forced: bool = False  # to compute the whole prompt
    is_shifted: bool = False  # its context was shifted while it generated
    n_computed: int | None = None
    prefill_ms: float | None = None
    n_begun: int = 0  # requests that the server had begun by then, this one too
    cache_type: str | None = None

    def took(self, prefill_ms: float | None) -> bool:
        """Whether the prefill took as long, as far as the log writes it out."""
        if prefill_ms is None or self.prefill_ms is None:
            return prefill_ms is None
        return abs(self.prefill_ms - prefill_ms) < PRINTED_MS


class ServerLog:
    """A log that a server still writes."""

    def __init__(self, path: Path) -> None:
        self.served: list[Served] = []
        self._path = path
        self._position = 0
        self._rest = ""
        self._start = 0
        self._n_dropped = 0
        self._n_begun = 0
        self._cache_type: str | None = None
        self._chosen: dict[int, Served] = {}  # by slot, of a request that has no number yet
        self._running: dict[int, Served] = {}  # by task

    def find(self, n_computed: int, prefill_ms: float | None) -> Served | None:
        """The latest request with this prefill (None: not known); None if the log has none."""
        deadline = time.monotonic() + WAIT_S
        while True:
            self.read()
            for served in reversed(self.served):
                if served.n_computed == n_computed and served.took(prefill_ms):
                    return served
            if time.monotonic() > deadline:
                return None
            time.sleep(LOOK_S)

    def held_after(self, served: Served) -> dict[int, int]:
        """The latest task of each slot after a request."""
        held: dict[int, int] = {}
        for request in sorted(self.served, key=lambda request: request.n_begun):
            if request.slot is None or request.task is None:
                continue
            if request.start == served.start and request.n_begun <= served.n_begun:
                held[request.slot] = request.task
        return held

    def read(self) -> None:
        """Read what the server has written since."""
        try:
            if self._path.stat().st_size < self._position:  # begun anew
                self._position = 0
                self._rest = ""
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read(MOST_BYTES)
        except OSError:
            return
        self._position += len(data)
        *lines, self._rest = (self._rest + data.decode(errors="replace")).split("\n")
        for line in lines:
            self._add(line)

    def _add(self, line: str) -> None:
        match = SLOT_LINE.search(line)
        if match:
            self._add_of_slot(int(match[1]), int(match[2]), match[3])
        elif LOADING.search(line):
            self._start += 1
            self._chosen.clear()
            self._running.clear()
        elif any(words in line for words in DROPPED) or DROPPED_TOKENS.search(line):
            self._n_dropped += 1
        elif types := CACHE_TYPES.search(line):
            self._cache_type = f"{types[1]}, {types[2]}"

    def _add_of_slot(self, slot: int, task: int, text: str) -> None:
        if text.lstrip().startswith("selected slot by"):
            self._chosen[slot] = chosen(slot, text)
            return
        if task < 0:
            return
        if task not in self._running:
            self._begin(slot, task)
        served = self._running[task]
        prefill = PREFILL.search(text)
        if FORCED in text:
            served = replace(served, is_forced=True)
        elif SHIFTED in text:
            served = replace(served, is_shifted=True)
        elif prefill:
            served = replace(served, prefill_ms=float(prefill[1]), n_computed=int(prefill[2]))
            self.served.append(served)
        self._running[task] = served

    def _begin(self, slot: int, task: int) -> None:
        """Note a request that the server begins."""
        self._n_begun += 1
        self._running[task] = replace(
            self._chosen.pop(slot, Served(slot, task)),
            task=task,
            start=self._start,
            n_dropped=self._n_dropped,
            n_begun=self._n_begun,
            cache_type=self._cache_type,
        )


def chosen(slot: int, text: str) -> Served:
    """How a slot was chosen for the next request."""
    similar = SIMILARITY.search(text)
    if similar:
        return Served(slot, -1, chosen_by=SIMILAR, similarity=float(similar[1]))
    return Served(slot, -1, chosen_by=OLDEST if "LRU" in text else CHOSEN)
