"""Who is right about several users of a real llama-server: the lab's client, or an independent one of 40 lines?

    python3 -m uv run python -m tests.bench.four_users [TRIALS] [USERS] [THREADS]

Both clients send the same work in a closed loop, in trials in random order, through a tap: a process that passes all
bytes on and stamps each as it passes. So there are two stamps of each request, the client's own and the tap's. Where
client and tap agree, the client measures rightly, and what differs between the clients is what the server did. Printed
are medians over trials of the medians of requests, and of client / tap (0.97 to 1.03 wanted).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from lab.core.record import OK
from lab.core.request import CHAT, Asked
from lab.core.request_times import figures
from lab.features.serve.formats import SendPlan
from lab.features.serve.servers import Server, connect
from lab.models import catalog
from tests.servers import wheel_server

N_PROMPT, N_GEN, N_EACH = 128, 32, 4
NAMES = ("lab", "independent")
FIELDS = ("TTFT ms", "TPOT ms", "E2E ms")
WORDS = "The keeper of the lighthouse counted ships and wrote their names into a long grey book every evening. " * 40
CONTENT = b'"content":"'
Row = tuple[float, float, float]
"""TTFT, TPOT, E2E in milliseconds."""


def row(sent: float, stamps: Sequence[float]) -> Row:
    first, last = stamps[0], stamps[-1]
    return 1e3 * (first - sent), 1e3 * (last - first) / max(1, len(stamps) - 1), 1e3 * (last - sent)


# The tap, and the independent client: each a process of its own


async def tap(port: int) -> None:
    """Pass on what comes to the port that is printed; then, for each request, print its sending and its contents."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        sent, stamps = 0.0, []  # type: float, list[float]

        async def forward() -> None:
            nonlocal sent
            while data := await reader.read(1 << 16):
                if data.startswith(b"POST"):
                    sent = time.perf_counter()
                up_writer.write(data)
            up_writer.close()

        there = asyncio.create_task(forward())
        while data := await up_reader.read(1 << 16):
            stamps += [time.perf_counter()] * data.count(CONTENT)
            writer.write(data)
            if b"[DONE]" in data:
                print(json.dumps(row(sent, stamps)), flush=True)
                stamps = []
        writer.close()
        there.cancel()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def independent(port: int, n_users: int, bodies: list[str]) -> None:
    """Users who send one body after the other; of each request its row is printed."""
    left = iter(bodies)

    async def user() -> None:
        for body in left:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            sent = time.perf_counter()
            writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{body}".encode())
            stamps = []
            while line := await reader.readline():
                if CONTENT in line:
                    stamps.append(time.perf_counter())
            writer.close()
            print(json.dumps(row(sent, stamps)), flush=True)

    await asyncio.gather(*(user() for _ in range(n_users)))


# The trials


def bodies(server: Server, n: int, seed: int) -> tuple[Any, ...]:
    """So many requests of exactly N_PROMPT tokens, none of which the server has seen."""
    asked = Asked(n_prompt=N_PROMPT, n_gen=N_GEN, temperature=0.0, ignore_eos=server.ignores_eos)
    return tuple(server.ask(server.prompt(N_PROMPT, WORDS, seed, i), asked, is_sent_once=True) for i in range(n))


def of_lab(server: Server, n_users: int, asks: tuple[Any, ...]) -> list[Row]:
    rows: list[Row] = []
    for reply in server.client.run(SendPlan(asks=asks, api=CHAT, n_at_once=n_users)):
        request = reply.request
        one = figures(request)
        own = one.ttft_ns, one.tpot_ns, one.e2e_ns
        assert request.status == OK and None not in own, request.error
        rows.append(tuple((ns or 0) / 1e6 for ns in own))  # type: ignore[arg-type]
    return rows


def of_independent(port: int, n_users: int, asks: tuple[Any, ...]) -> list[Row]:
    command = [sys.executable, "-m", "tests.bench.four_users", "independent", str(port), str(n_users)]
    text = json.dumps([ask.body for ask in asks])
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def medians(rows: Sequence[Row]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def main(n_trials: int = 6, n_users: int = 4, n_threads: int = 2) -> None:
    options = (
        "--parallel",
        str(n_users),
        "--ctx-size",
        str(n_users * 512),
        "--threads",
        str(n_threads),
        "--no-cache-prompt",
    )
    seen: dict[str, list[list[float]]] = {f"{name}, {by}": [] for name in NAMES for by in ("own", "tap")}
    with wheel_server(catalog.embedded_path(), *options) as real:
        port = int(real.url.removesuffix("/v1").rpartition(":")[2])
        command = [sys.executable, "-m", "tests.bench.four_users", "tap", str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tapping:
            assert tapping.stdout
            tapped = int(tapping.stdout.readline())
            with connect(f"http://127.0.0.1:{tapped}/v1", api=CHAT) as server:
                server_rows = [tapping.stdout.readline() for _ in range(3)]  # of the probe
                assert all(server_rows)
                for trial in range(n_trials):
                    for name in random.Random(trial).sample(NAMES, 2):
                        asks = bodies(server, n_users * N_EACH, 2 * trial + NAMES.index(name))
                        own = of_lab(server, n_users, asks) if name == "lab" else of_independent(tapped, n_users, asks)
                        passed = [json.loads(tapping.stdout.readline()) for _ in asks]
                        for by, rows in (("own", own), ("tap", passed)):
                            seen[f"{name}, {by}"].append(medians(rows))
                        shown = [[round(value, 1) for value in medians(rows)] for rows in (own, passed)]
                        print(f"trial {trial + 1}, {name}: {shown[0]}, by the tap {shown[1]}", flush=True)
            tapping.kill()
    report(seen)


def report(seen: dict[str, list[list[float]]]) -> None:
    for i, field in enumerate(FIELDS):
        of = {name: [trial[i] for trial in trials] for name, trials in seen.items()}

        def ratio(one: str, other: str, of: dict[str, list[float]] = of) -> float:
            return statistics.median(a / b for a, b in zip(of[one], of[other], strict=True))

        own = ", ".join(f"{name} {ratio(f'{name}, own', f'{name}, tap'):.3f}" for name in NAMES)
        print(f"{field}: {', '.join(f'{name} {statistics.median(values):.2f}' for name, values in of.items())}")
        print(f"  own / tap: {own}; by the tap, lab / independent: {ratio('lab, tap', 'independent, tap'):.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["tap"]:
        asyncio.run(tap(int(sys.argv[2])))
    elif sys.argv[1:2] == ["independent"]:
        asyncio.run(independent(int(sys.argv[2]), int(sys.argv[3]), json.load(sys.stdin)))
    else:
        main(*map(int, sys.argv[1:]))
