"""What else this machine did while a server on it answered.

A server elsewhere is not watched: nothing here says what its machine does. Nor is one with a
process that this user cannot see, because its work would look like that of another program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from lab.core.record import Noise
from lab.remote.access import Access, is_loopback
from lab.runner import noise_watch

SAMPLE_S = 0.5  # between readings, which take the thread that stamps about 0.3 ms


class RequestWatch:
    """Call `look` while requests are under way, then `finish`. `pids`: of `server_pids`."""

    def __init__(self, pids: Sequence[int], look: Callable[[], None]) -> None:
        self._look = look
        self._watch: noise_watch.NoiseWatch | None = None
        self._sampled = time.monotonic()
        if pids:
            self._watch = noise_watch.NoiseWatch(*pids)

    def look(self) -> None:
        self._look()
        if self._watch is not None and time.monotonic() - self._sampled >= SAMPLE_S:
            self._sampled = time.monotonic()
            self._watch.sample()

    def finish(self) -> Noise | None:
        """All readings since the beginning; None if nothing was watched."""
        return None if self._watch is None else self._watch.finish()


def server_pids(access: Access) -> list[int]:
    """The processes of a server on this machine; none if they cannot be seen."""
    if not is_loopback(access):
        return []
    url = urlsplit(access.url)
    port = url.port or (443 if url.scheme == "https" else 80)
    return noise_watch.pids_listening(port)
