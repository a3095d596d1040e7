"""The sessions of notebook 9, each with one planted fault, and a clean one.

    python -m tests.bench.six_faults          # all, into notebooks/faults; two minutes
    python -m tests.bench.six_faults 3 4      # two of them

Real, on the machine that runs this: 3 (two threads of llama.cpp beside a busy program on two cores,
against one), 2 (a conversation through llama-server, with a clock in the system prompt) and 4
(plain decode by the lab, against llama-server's log with drafts looked up in the text). 6 is a copy
of tests/data/slow-attention-intel-xeon.jsonl, measured on a CPU with AVX512-FP16. `base`, without a
fault, is a part of a committed sample.

Planted by arithmetic, because a virtual machine cannot be throttled or made to swap on demand:
5 (throttled) and 1 (swapped) are the runs of `base`, of which 4 of 7 are disturbed. Their steps are
stretched, and their counters say what such a machine's counters say.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.app.reading import read
from lab.core import results
from lab.core.record import Noise, Record, Steps
from lab.features.measure import measure
from lab.models import catalog
from tests.bench.record import recorded
from tests.support.servers import wheel_server

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks" / "faults"
SAMPLE = ROOT / "results" / "sample-to-compare-smollm2-135m-amd-epyc.jsonl"
N_PROMPT = 512  # of the runs of the sample that are taken
N_RUNS = 7
N_DISTURBED = 4
THROTTLED = 1.8  # times as long, each step
SWAPPED_SHARE = 0.25  # of the steps that wait for pages
SWAPPED = 7.0  # times as long, each of them
SEED = 71

RULES = (
    "You answer questions about a harbour. Ships wait at the outer mole until the pilot comes. "
    "The keeper writes their names, their flags and the hour into the book. "
) * 10
QUESTIONS = (
    "Where do ships wait?",
    "What is written down?",
    "Who comes to them?",
    "Where is the book?",
    "Which flags are there?",
)
REPEATING = (
    "The keeper of the lighthouse counted ships and wrote their names into a book. " * 9
)
N_GEN = 96


def clean_runs() -> list[Record]:
    """The first timed runs of the sample with the long prompt."""
    records = read((str(SAMPLE),)).records
    timed = [
        record for record in records if record.run.is_timed and record.run.n_prompt == N_PROMPT
    ]
    return timed[:N_RUNS]


def save_all(name: str, records: Sequence[Record]) -> None:
    path = FOLDER / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    for record in records:
        results.save(path, record)


def clean() -> None:
    save_all("base", clean_runs())


def throttled() -> None:
    """From the third run on, each step takes longer, and the counter of throttling rises."""
    records = []
    for index, record in enumerate(clean_runs()):
        if index >= N_RUNS - N_DISTURBED:
            steps = stretched(record.run.steps, [THROTTLED] * len(record.run.steps.kind))
            record = with_run(record, steps, n_throttled=(3 * index, 3 * index + 3))
        else:
            record = with_run(record, record.run.steps, n_throttled=(0, 0))
        records.append(replace(record, session=f"{record.session}-5"))
    save_all("5", records)


def swapped() -> None:
    """In the last runs some steps wait for pages, and the pressure of memory says for how long."""
    draw = random.Random(SEED)
    records = []
    for index, record in enumerate(clean_runs()):
        if index >= N_RUNS - N_DISTURBED:
            factors = []
            for _ in record.run.steps.kind:
                factors.append(SWAPPED if draw.random() < SWAPPED_SHARE else 1.0)
            steps = stretched(record.run.steps, factors)
            waited_s = (steps.end_ns[-1] - record.run.steps.end_ns[-1]) / 1e9
            record = with_run(record, steps, memory_pressure_s=(0.0, waited_s))
        records.append(replace(record, session=f"{record.session}-1"))
    save_all("1", records)


def stretched(steps: Steps, factors: Sequence[float]) -> Steps:
    """The steps with times multiplied; the time between two steps stays."""
    starts, readies, ends = [], [], []
    shift_ns = 0
    for start, ready, end, factor in zip(
        steps.start_ns, steps.ready_ns, steps.end_ns, factors, strict=True
    ):
        longer_ns = round((factor - 1) * (ready - start))
        starts.append(start + shift_ns)
        readies.append(ready + shift_ns + longer_ns)
        ends.append(end + shift_ns + longer_ns)
        shift_ns += longer_ns
    return replace(steps, start_ns=tuple(starts), ready_ns=tuple(readies), end_ns=tuple(ends))


def with_run(record: Record, steps: Steps, **counters: tuple[Any, Any]) -> Record:
    """A record with other steps, and with counters before and after its run."""
    noise = record.run.noise
    assert noise is not None
    assert noise.samples is not None
    before = {name: values[0] for name, values in counters.items()}
    after = {name: values[1] for name, values in counters.items()}
    longer = steps.end_ns[-1] / record.run.steps.end_ns[-1]
    samples = replace(
        noise.samples, at_ms=tuple(round(ms * longer) for ms in noise.samples.at_ms)
    )
    planted: Noise = replace(
        noise,
        before=replace(noise.before, **before),
        after=replace(noise.after, **after),
        samples=samples,
    )
    return replace(record, run=replace(record.run, steps=steps, noise=planted))


@contextmanager
def busy_program() -> Iterator[None]:
    """A program of a group of its own that keeps a core busy."""
    program = subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], start_new_session=True
    )
    try:
        yield
    finally:
        program.kill()
        program.wait()


def threads() -> None:
    """One thread, and two, beside a program that needs one of two cores."""
    path = FOLDER / "3.jsonl"
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder, busy_program():
        for n_threads in (1, 2):
            records = measure("128", 24, 3, threads=n_threads, out=folder)
            for record in records:
                if record.run.is_timed:
                    results.save(path, record)


def kernel() -> None:
    shutil.copy(ROOT / "tests/data/slow-attention-intel-xeon.jsonl", FOLDER / "6.jsonl")


def cache() -> None:
    """A conversation whose client writes the time into the system prompt, recorded."""
    model = catalog.embedded_path()
    with (
        tempfile.TemporaryDirectory() as folder,
        wheel_server(
            model, "--threads", "1", "--ctx-size", "2048", alias="smollm2-135m"
        ) as server,
    ):
        with recorded(server.url, folder) as (url, _recorder):
            converse(url)
        text = (Path(folder) / "recording.jsonl").read_text()
    (FOLDER / "2.jsonl").write_text(text)


def converse(url: str) -> None:
    """Ask all questions, each with the clock of its minute in the system prompt."""
    messages: list[dict[str, str]] = []
    for minute, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        system = f"It is 2026-11-29 08:{10 + minute}. {RULES}"
        body = {
            "messages": [{"role": "system", "content": system}, *messages],
            "max_tokens": 24,
            "temperature": 0,
        }
        answer = asked(f"{url}/v1/chat/completions", body)
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )


def asked(url: str, body: dict[str, object]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        answer: dict[str, Any] = json.loads(reply.read())
    return answer


def speculation() -> None:
    """Plain decode of one thread by the lab; llama-server's log of one thread with drafts."""
    path = FOLDER / "4.jsonl"
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for record in measure("155", N_GEN, 3, threads=1, out=folder):
            if record.run.is_timed:
                results.save(path, record)
    model = catalog.embedded_path()
    options = ("--threads", "1", "--ctx-size", "2048", "--lookup", "4")
    with wheel_server(model, *options, alias=None) as server:
        body: dict[str, object] = {
            "prompt": REPEATING,
            "n_predict": N_GEN,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": True,
        }
        root = server.url.removesuffix("/v1")
        for _ in range(2):  # the first warms up
            asked(f"{root}/completion", body)
        text = server.log.read_text(errors="replace")
    (FOLDER / "4.txt").write_text(log_of_last(text))


def log_of_last(text: str) -> str:
    """The lines of a llama-server's log on its setup and on its last request."""
    task = re.findall(r"print_timing: id  0 \| task (\d+)", text)[-1]
    lines = []
    for line in text.splitlines():
        is_setup = re.search(r"loading model '|n_threads|n_slots|speculative", line)
        if is_setup or re.search(rf"(print_timing|release): id  0 \| task {task}\b", line):
            lines.append(re.sub(r"'[^']*/", "'", line))
    return "\n".join(lines) + "\n"


SESSIONS: dict[str, Callable[[], None]] = {
    "base": clean,
    "1": swapped,
    "2": cache,
    "3": threads,
    "4": speculation,
    "5": throttled,
    "6": kernel,
}
"""What makes each session; the files have the numbers of the notebook."""


def main(*names: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or tuple(SESSIONS):
        SESSIONS[name]()
        for path in sorted(FOLDER.glob(f"{name}.*")):
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])
