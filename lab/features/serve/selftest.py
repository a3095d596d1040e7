"""Measure the client's timing error with a server that sends every event at a known time.

The error is the time from an event's sending to its stamp, with the kernel's loopback and the wake-up of the process.
Figures of a server that are not much larger than this error say more about the client than about the server.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import CHAT, Asked
from lab.errors import LabError
from lab.features.serve.access import access, ask
from lab.features.serve.client import Client
from lab.features.serve.formats import CONTINUOUS_USAGE, INCLUDE_USAGE, as_dict, ask_for
from lab.features.serve.null_server import null_server
from lab.features.serve.send_plan import Reply, SendPlan


def client_error(n_streams: int = 1, seconds: float = 1.0) -> tuple[int, int] | None:
    """The client's error now, with `n_streams` streams: median and 99th percentile, in ns.

    Runs for about `seconds` with a null server. None if that fails.
    """
    gap_ms = min(20.0, 5.0 * n_streams)
    try:
        errors_ns, _ = selftest(n_streams, max(2, round(1000 * seconds / gap_ms)), gap_ms, n_rounds=1)
    except LabError:
        return None
    return quantile(errors_ns, 0.5), quantile(errors_ns, 0.99)


def selftest(n_streams: int, n_tokens: int, gap_ms: float, n_rounds: int) -> tuple[list[int], list[int]]:
    """For each event its stamp minus the time of its sending, and how late the null server sent it, in ns."""
    options = (INCLUDE_USAGE, CONTINUOUS_USAGE)
    asked = [Asked(n_prompt=None, n_gen=n_tokens, seed=seed) for seed in range(n_streams * n_rounds)]
    asks = tuple(ask_for(CHAT, "null", "a b c", one, options) for one in asked)
    with null_server(str(gap_ms)) as server:
        reached = access(server.url)
        with Client(reached) as client:
            replies = list(client.run(SendPlan(asks=asks, api=CHAT, n_at_once=n_streams)))
            start_ns = client.start_ns or 0
        streams = as_dict(ask(reached, f"{reached.root}/null/sent").parsed)["streams"]
    sent_ns = {stream["seed"]: stream["sent_ns"] for stream in streams}
    errors_ns = [ns for reply in replies for ns in stamped_late(reply, sent_ns[reply.request.asked.seed], start_ns)]
    late_ns = [a - b for stream in streams for a, b in zip(stream["sent_ns"], stream["due_ns"], strict=True)]
    return errors_ns, late_ns


def stamped_late(reply: Reply, sent_ns: Sequence[int], start_ns: int) -> list[int]:
    """The stamp of each event with content, minus the time of its sending. LabError if the client missed one."""
    request = reply.request
    indices = times.generated(request)
    if request.status != OK or request.sent_ns is None or len(indices) != len(sent_ns):
        raise LabError(
            f"Only {len(indices)} of {len(sent_ns)} null-server events arrived ({request.failure or 'no error'}).",
            "Run it again on a quiet machine. If it fails again, this is a bug of the lab.",
        )
    began_ns = start_ns + request.sent_ns
    return [began_ns + request.events.arrive_ns[i] - ns for i, ns in zip(indices, sent_ns, strict=True)]


def quantile(values: Sequence[int], share: float) -> int:
    """The value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
