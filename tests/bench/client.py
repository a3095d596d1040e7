"""The timing error of the lab's client for servers: python -m tests.bench.client [STREAMS...]

The null server sends events at known times, and the client stamps them. The error is the time from
an event's sending to its stamp, with the kernel's loopback and the wake-up of the process. Wanted
with 16 streams on 2 cores: a median of 100 us, 99 % below 1 ms. Times of a server that are close to
these errors are not reliable.
"""

import sys
from collections.abc import Sequence

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import CHAT, Asked
from lab.remote.access import access
from lab.remote.client import Client
from lab.remote.formats import CONTINUOUS_USAGE, INCLUDE_USAGE, Reply, SendPlan, ask_for
from tests.null_server import RUNNING, Behaviour, NullSettings, null_server

N_TOKENS = 200
GAP_MS = 20.0
N_ROUNDS = 2


def selftest(
    n_streams: int, n_tokens: int, gap_ms: float, n_rounds: int
) -> tuple[list[int], list[int]]:
    """For each event its stamp minus the time of its sending, and how late the null server sent it,
    in ns."""
    options = (INCLUDE_USAGE, CONTINUOUS_USAGE)
    asked = [
        Asked(n_prompt=None, n_gen=n_tokens, seed=seed) for seed in range(n_streams * n_rounds)
    ]
    asks = tuple(ask_for(CHAT, "null", "a b c", one, options) for one in asked)
    with null_server(
        NullSettings(models={"null": Behaviour(usage=RUNNING, gap_ms=gap_ms)})
    ) as server:
        with Client(access(server.url)) as client:
            replies = list(client.run(SendPlan(asks=asks, api=CHAT, n_at_once=n_streams)))
            start_ns = client.start_ns
        streams = server.sent()["streams"]
    sent_ns = {stream["seed"]: stream["sent_ns"] for stream in streams}
    errors_ns = [
        ns
        for reply in replies
        for ns in stamped_late(reply, sent_ns[reply.request.asked.seed], start_ns)
    ]
    late_ns = [
        a - b
        for stream in streams
        for a, b in zip(stream["sent_ns"], stream["due_ns"], strict=True)
    ]
    return errors_ns, late_ns


def stamped_late(reply: Reply, sent_ns: Sequence[int], start_ns: int) -> list[int]:
    """The stamp of each event with content, minus the time of its sending."""
    request = reply.request
    assert request.status == OK and request.sent_ns is not None, request.error
    began_ns = start_ns + request.sent_ns
    stamps = (request.events.arrive_ns[i] for i in times.generated(request))
    return [began_ns + stamp - ns for stamp, ns in zip(stamps, sent_ns, strict=True)]


def quantile(values: Sequence[int], share: float) -> int:
    """The value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    print("streams    events  events/s  median us  99 % us   max us  server late, 99 % us")
    for n_streams in [int(number) for number in sys.argv[1:]] or [1, 16]:
        errors_ns, late_ns = selftest(n_streams, N_TOKENS, GAP_MS, N_ROUNDS)
        median, high, most = (quantile(errors_ns, share) / 1e3 for share in (0.5, 0.99, 1.0))
        late = quantile(late_ns, 0.99) / 1e3
        rate = n_streams * 1e3 / GAP_MS
        print(
            f"{n_streams:7}{len(errors_ns):10,}{rate:10,.0f}{median:11,.0f}{high:9,.0f}{most:9,.0f}{late:22,.0f}"
        )


if __name__ == "__main__":
    main()
