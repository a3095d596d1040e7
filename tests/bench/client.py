"""The timing error of the lab's client for servers: python -m tests.bench.client [STREAMS...]

The null server sends events at known times, and the client stamps them. The error is the time from
an event's sending to its stamp, with the kernel's loopback and the wake-up of the thread. Wanted
with 1 and 16 streams on 2 cores: a median below 200 us. Times of a server that are close to these
errors are not reliable.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import CHAT, Asked
from lab.remote.access import access
from lab.remote.client import Client
from lab.remote.formats import CONTINUOUS_USAGE, INCLUDE_USAGE, Ask, Reply, SendPlan, ask_for
from tests.support.null_server import RUNNING, Behaviour, NullSettings, null_server

N_TOKENS = 200
GAP_MS = 20.0
N_ROUNDS = 2
OPTIONS = (INCLUDE_USAGE, CONTINUOUS_USAGE)


class Lateness(NamedTuple):
    """In ns: how late events were stamped after their sending, and sent after their time."""

    stamped: list[int]
    sent: list[int]


def measure(n_streams: int) -> Lateness:
    """The lateness of all events of N_ROUNDS answers of each stream."""
    asks = tuple(ask_with(seed) for seed in range(n_streams * N_ROUNDS))
    behaviour = Behaviour(usage=RUNNING, gap_ms=GAP_MS)
    with null_server(NullSettings(models={"null": behaviour})) as server:
        with Client(access(server.url)) as client:
            plan = SendPlan(asks=asks, api=CHAT, n_at_once=n_streams)
            replies = list(client.run(plan))
            start_ns = client.start_ns
        streams = {stream["seed"]: stream for stream in server.sent()["streams"]}
    lateness = Lateness([], [])
    for reply in replies:
        stream = streams[reply.request.asked.seed]
        lateness.stamped.extend(stamped_late(reply, stream, start_ns))
        lateness.sent.extend(sent_late(stream))
    return lateness


def ask_with(seed: int) -> Ask:
    asked = Asked(n_prompt=None, n_gen=N_TOKENS, seed=seed)
    return ask_for(CHAT, "null", "a b c", asked, OPTIONS)


def stamped_late(
    reply: Reply,
    stream: dict[str, Any],
    start_ns: int,
) -> list[int]:
    """The stamp of each event with content, minus the time of its sending."""
    request = reply.request
    assert request.status == OK, request.error
    assert request.sent_ns is not None
    began_ns = start_ns + request.sent_ns
    stamps = times.arrivals_ns(request)
    return [
        began_ns + stamp - sent_ns
        for stamp, sent_ns in zip(stamps, stream["sent_ns"], strict=True)
    ]


def sent_late(stream: dict[str, Any]) -> list[int]:
    pairs = zip(stream["sent_ns"], stream["due_ns"], strict=True)
    return [sent_ns - due_ns for sent_ns, due_ns in pairs]


def quantile_us(values: Sequence[int], share: float) -> float:
    """The value below which this share of the values lies, in us."""
    rank = min(len(values) - 1, int(share * len(values)))
    return sorted(values)[rank] / 1e3


def main() -> None:
    print("streams    events  events/s  median us  99 % us   max us  server late, 99 % us")
    for n_streams in [int(number) for number in sys.argv[1:]] or [1, 16]:
        lateness = measure(n_streams)
        rate = n_streams * 1e3 / GAP_MS
        median = quantile_us(lateness.stamped, 0.5)
        high = quantile_us(lateness.stamped, 0.99)
        most = quantile_us(lateness.stamped, 1.0)
        late = quantile_us(lateness.sent, 0.99)
        print(
            f"{n_streams:7}{len(lateness.stamped):10,}{rate:10,.0f}{median:11,.0f}"
            f"{high:9,.0f}{most:9,.0f}{late:22,.0f}"
        )


if __name__ == "__main__":
    main()
