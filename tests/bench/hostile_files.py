"""What hostile model files get: an error that says what is wrong, never a hang, a traceback or all the memory.

python -m tests.bench.hostile_files [N]

Every file goes through what `lab models info` and `lab measure -p 8 -n 2 -r 1` do.
"""

from __future__ import annotations

import collections
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lab.core import cost, memory
from lab.core import script as scripts
from lab.errors import LabError
from lab.models import catalog, synthetic
from lab.models.catalog import Shape
from lab.process.worker import Worker, WorkerDied
from lab.runner import prompts
from lab.runner.plan import make_plan
from lab.show import text_setup
from tests.hostile import gguf as hostile

LIMIT_S = 10.0
LIMIT_BYTES = 2_000_000_000
N_DEFAULT, SEED = 500, 3
OK, REFUSED, DIED, HANG, MEMORY, BUG = "ok", "LabError", "died, told", "hang", "memory", "BUG"
GOOD = (OK, REFUSED, DIED)
TINY = Shape("llama", 2, 256, 4, 2, 64, 512, 320, 512, False, 10_000.0)


@dataclass(frozen=True)
class Outcome:
    """How a file ended, in which verb, what was said; the child's own memory is without the mapped file."""

    name: str
    result: str
    stage: str
    said: str
    seconds: float
    n_bytes: int


class Watchdog:
    """Watches a worker's child: kills it after LIMIT_S, or when its own memory has grown by LIMIT_BYTES."""

    def __init__(self, worker: Worker) -> None:
        self._child = psutil.Process(worker._process.pid)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.verdict = ""
        self.n_bytes = 0

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        started = time.monotonic()
        try:
            before = own_memory(self._child)
            while not self._done.wait(0.005):
                self.n_bytes = max(self.n_bytes, own_memory(self._child) - before)
                self.verdict = MEMORY if self.n_bytes > LIMIT_BYTES else ""
                if time.monotonic() - started > LIMIT_S:
                    self.verdict = HANG
                if self.verdict:
                    self._child.kill()
                    return
        except psutil.NoSuchProcess:
            return  # it died by itself; the worker tells


def own_memory(process: psutil.Process) -> int:
    """Bytes in memory that are no file's."""
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def attempt(worker: Worker, name: str, path: Path, prompt: str) -> Outcome:
    """Put one file through a worker; afterwards the worker is ready for the next."""
    stage, result, said, started = ["read_model"], OK, "", time.monotonic()
    with Watchdog(worker) as watchdog:
        try:
            measure(worker, path, prompt, stage)
        except LabError as problem:
            result, said = REFUSED, problem.what
            if isinstance(problem, WorkerDied):  # of Python's own accord, where it was not native code
                result = BUG if "exit status" in said or "Python frame" in said else DIED
        except Exception:
            result, said = BUG, traceback.format_exc()
    seconds = time.monotonic() - started
    if watchdog.verdict:
        result = watchdog.verdict
    if result != REFUSED or stage[0] not in ("read_model", "load"):
        worker.restart()  # it is dead, or holds a model
    return Outcome(name, result, stage[0], said, seconds, watchdog.n_bytes)


def measure(worker: Worker, path: Path, prompt: str, stage: list[str]) -> None:
    """What `lab models info` and `lab measure` do with a file."""
    model = worker.read_model(path, path.stem, catalog.FILE)
    stage[0] = "describe"
    per_position, per_step = memory.kv_bytes_per_position(model), cost.weight_bytes_per_step(model)
    lengths = {n: None if per_position is None else round(n * per_position) for n in (1_000, 128_000)}
    text_setup.describe_model(model, path, per_step, per_position, lengths, None)
    stage[0] = "plan"
    plan = make_plan(worker, "8", 2, 1, str(path), prompt=prompt, threads=2)
    for reason in plan.refused.values():
        raise LabError(reason)
    stage[0] = "load"
    vocabulary = worker.load(path, plan.settings)
    stage[0] = "tokenize"
    if plan.prompt.text is None:
        ids = prompts.random_ids(8, vocabulary.n_vocab, vocabulary.bos, 1, 0)
    else:
        text = worker.tokenize(plan.prompt.text)
        if not text:
            raise LabError("The prompt gives no tokens in this model.")  # in measure.py's words
        ids = prompts.cut(text, 8, prompts.offset(1, 0, len(text)), vocabulary.bos)
    stage[0] = "new_context"
    worker.new_context(plan.settings)
    stage[0] = "run"
    worker.run(scripts.run(ids, 2, 512), lambda progress: None)


def tiny(folder: Path) -> bytes:
    """A small synthetic model."""
    synthetic.write(TINY, "Q4_0", folder / "tiny.gguf")
    return (folder / "tiny.gguf").read_bytes()


def originals(folder: Path) -> list[tuple[str, bytes, str]]:
    """Name, bytes and prompt source: a small synthetic model, and the embedded one's first blocks."""
    embedded = hostile.shrunk(catalog.embedded_path().read_bytes(), 2)
    return [("synthetic", tiny(folder), prompts.RANDOM), ("embedded", embedded, prompts.TEXT)]


def outcomes(n: int, seed: int, folder: Path, show: bool = False) -> list[Outcome]:
    """n cases, from the originals in turn."""
    path, found = folder / "hostile.gguf", []
    sources = originals(folder)
    # The originals start at different kinds, so that few cases meet them all.
    halfway = len(hostile.kinds()) // len(sources)
    streams = [hostile.cases(raw, seed + i, n, i * halfway) for i, (_, raw, _) in enumerate(sources)]
    with Worker() as worker:
        for number in range(n):
            name, _, prompt = sources[number % len(sources)]
            what, mutated = next(streams[number % len(sources)])
            path.write_bytes(mutated)
            found.append(attempt(worker, f"#{number} {name}; {what}", path, prompt))
            if show:
                print(line(found[-1]), flush=True)
    return found


def kind(outcome: Outcome) -> str:
    return outcome.name.split("; ")[1].split(": ")[0]


def line(outcome: Outcome) -> str:
    said = " ".join(outcome.said.split())
    return (
        f"{outcome.result:10} {outcome.seconds:5.2f} s {outcome.n_bytes / 1e6:6,.0f} MB  {outcome.name}"
        f"  [{outcome.stage}] {said[-300:] if outcome.result == BUG else said[:200]}"
    )


def tally(found: Sequence[Outcome]) -> list[str]:
    """Outcomes by kind of mutation, then in total."""
    results = (OK, REFUSED, DIED, HANG, MEMORY, BUG)
    count = collections.Counter((kind(outcome), outcome.result) for outcome in found)
    total = collections.Counter(outcome.result for outcome in found)
    rows = [f"{'':26}" + "".join(f"{result:>12}" for result in results)]
    for name in dict.fromkeys(map(kind, found)):
        rows.append(f"{name:26}" + "".join(f"{count[name, result] or '-':>12}" for result in results))
    return [*rows, f"{'all':26}" + "".join(f"{total[result]:>12}" for result in results)]


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else N_DEFAULT
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = outcomes(n, SEED, Path(folder), show=True)
    print(f"\n{n} hostile files, seed {SEED}, in {time.monotonic() - started:.0f} s\n")
    print("\n".join(tally(found)))
    print(f"\nslowest         {line(max(found, key=lambda outcome: outcome.seconds))}")
    print(f"largest memory  {line(max(found, key=lambda outcome: outcome.n_bytes))}")
    bad = [outcome for outcome in found if outcome.result not in GOOD]
    print(f"\n{len(bad)} bad outcomes")
    for outcome in bad:
        print(line(outcome))
        if outcome.result == BUG:
            print(outcome.said)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
