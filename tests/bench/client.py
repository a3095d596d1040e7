"""The timing error of the lab's client for servers: python -m tests.bench.client [STREAMS...]

A local server sends events at known times, and the client stamps them. Wanted with 16 streams on 2 cores: a median of
100 us, 99 % below 1 ms. Times of a server that are close to these errors are not reliable.
"""

import sys

from lab.features.serve.selftest import quantile, selftest

N_TOKENS, GAP_MS, N_ROUNDS = 200, 20.0, 2


def main() -> None:
    print("streams    events  events/s  median us  99 % us   max us  server late, 99 % us")
    for n_streams in [int(number) for number in sys.argv[1:]] or [1, 16]:
        errors_ns, late_ns = selftest(n_streams, N_TOKENS, GAP_MS, N_ROUNDS)
        median, high, most = (quantile(errors_ns, share) / 1e3 for share in (0.5, 0.99, 1.0))
        late, rate = quantile(late_ns, 0.99) / 1e3, n_streams * 1e3 / GAP_MS
        print(f"{n_streams:7}{len(errors_ns):10,}{rate:10,.0f}{median:11,.0f}{high:9,.0f}{most:9,.0f}{late:22,.0f}")


if __name__ == "__main__":
    main()
