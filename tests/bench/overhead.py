"""Do the parts of the way through a server add up to the whole? Within 5 % on the real llama-server is wanted.

    python -m tests.bench.overhead [--blocks 6] [--prompt-len 100,512] [--threads N] [--fresh]

The lab measures llama-server on its own libraries and the same model in process, in turns. With --fresh the server is
another process in each block: a process is some percent faster or slower for as long as it lives. Then the same against
a null server whose every delay is planted, and the engine alone with the server idle and ended, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lab
from lab.core import phases
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.experiments import overhead_parts
from lab.experiments.overhead_parts import OTHERWISE, SLOT, STREAM, TEMPLATE, TOKENIZE, LengthParts
from lab.models import catalog
from lab.runner.limits import default_threads
from tests.null_server import Behaviour, NullSettings, null_server
from tests.servers import RealServer, llama_server

WANTED = 0.05
GEN = 64
N_IDLE = 4
"""Pairs of an engine alone, the server idle and ended."""

PLANTED_MS = {TEMPLATE: 30.0, TOKENIZE: 20.0, SLOT: 15.0, STREAM: 1.0}
"""The null server's delays; its other ones follow."""


@contextmanager
def real_server(n_threads: int) -> Iterator[RealServer]:
    options = ("--threads", str(n_threads), "--ctx-size", "4096")
    with llama_server(catalog.embedded_path(), *options) as server:
        yield server


def measure(url: str, folder: Path, lengths: str, blocks: int, n_threads: int) -> list[Record | RequestRecord]:
    return lab.overhead(
        url, catalog.DEFAULT, lengths, GEN, blocks, out=folder, watch=lambda status: None, threads=n_threads
    )


def rows_of(lines: Sequence[Record | RequestRecord]) -> list[LengthParts]:
    records = [line for line in lines if isinstance(line, Record)]
    return overhead_parts.rows(records, [line for line in lines if isinstance(line, RequestRecord)])


def print_row(row: LengthParts) -> None:
    for phase in row.phases:
        print(f"\n{phase.name}, {row.n_prompt} prompt tokens, {row.n_gen} generated, {row.n_blocks} blocks")
        for part in phase.parts:
            print(f"  {part.name:22}{part.ms:10.3f} ms   ({part.low_ms:.3f} to {part.high_ms:.3f})")
        print(f"  {'sum of the parts':22}{phase.server_ms - phase.unexplained_ms:10.3f} ms")
        verdict = "ok" if abs(phase.unexplained) <= WANTED else "MISSED"
        print(f"  {'the whole':22}{phase.server_ms:10.3f} ms   not explained {phase.unexplained:+.2%}  {verdict}")
        apart = (phase.ms(OTHERWISE) or 0.0) / phase.server_ms
        print(f"  {'without ' + OTHERWISE:22}{'':13}   not explained {phase.unexplained + apart:+.2%}")
        print(f"  {'in process':22}{phase.in_process_ms:10.3f} ms   blocks differ by {phase.spread:.1%}")


def real(folder: Path, lengths: str, blocks: int, is_fresh: bool, n_threads: int) -> None:
    lines: list[Record | RequestRecord] = []
    for first in range(blocks if is_fresh else 1):
        with real_server(n_threads) as server:
            lines += measure(server.url, folder / str(first), lengths, 1 if is_fresh else blocks, n_threads)
    for row in rows_of(lines):
        print_row(row)


def planted(folder: Path, blocks: int) -> None:
    """The parts of a null server. Its delays are slept, so what is found is a little more."""
    slot_ms, prompt_ms, n_prompt, n_gen = PLANTED_MS[TEMPLATE] + PLANTED_MS[TOKENIZE] + PLANTED_MS[SLOT], 200.0, 64, 17
    behaviour = Behaviour(
        first_ms=slot_ms + prompt_ms,
        gap_ms=10.0,
        timings=True,
        prompt_ms=prompt_ms,
        gen_ms=10.0 * (n_gen - 1),
        whole_gen_ms=(10.0 - PLANTED_MS[STREAM]) * (n_gen - 1),
        slot_ms=slot_ms,
    )
    settings = NullSettings(
        models={"null": behaviour}, template_ms=PLANTED_MS[TEMPLATE], tokenize_ms=PLANTED_MS[TOKENIZE]
    )
    with null_server(settings) as server:
        lines = lab.overhead(
            server.url, catalog.DEFAULT, [n_prompt], n_gen, blocks, out=folder, watch=lambda status: None
        )
    (row,) = rows_of(lines)
    print("\nA null server with planted delays")
    for phase in row.phases:
        for part in phase.parts:
            if part.name in PLANTED_MS:
                print(f"  {part.name:12} planted {PLANTED_MS[part.name]:7.3f} ms, found {part.ms:7.3f} ms")
        print(f"  {phase.name:12} not explained {phase.unexplained_ms:+.3f} ms ({phase.unexplained:+.2%})")


def idle(folder: Path, n_threads: int) -> None:
    """The engine's TPOT in process while a llama-server is idle, and without one."""
    tpot_ms: dict[bool, list[float]] = {True: [], False: []}
    for number in range(N_IDLE):
        for has_server in (True, False) if number % 2 else (False, True):
            if has_server:
                with real_server(n_threads):
                    time.sleep(1)
                    tpot_ms[True].append(alone_ms(folder, n_threads))
            else:
                tpot_ms[False].append(alone_ms(folder, n_threads))
    with_idle, without = (statistics.median(tpot_ms[has]) for has in (True, False))
    ratio = with_idle / without - 1
    print(f"\nThe engine alone: {without:.3f} ms a token; with an idle llama-server {with_idle:.3f} ({ratio:+.1%})")


def alone_ms(folder: Path, n_threads: int) -> float:
    records = lab.measure([100], GEN, 1, out=folder, watch=lambda status: None, threads=n_threads)
    return next((phases.tpot_ns(one.run) or 0.0) / 1e6 for one in records if not one.run.warmup)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--prompt-len", default="100,512")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--only", choices=("real", "planted", "idle"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.only in (None, "real"):
            real(folder / "real", asked.prompt_len, asked.blocks, asked.fresh, asked.threads)
        if asked.only in (None, "planted"):
            planted(folder / "planted", min(asked.blocks, 3))
        if asked.only in (None, "idle"):
            idle(folder / "idle", asked.threads)


if __name__ == "__main__":
    main()
