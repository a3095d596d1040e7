"""The loop: run after run, each on disk the moment it ends, whatever happens to the next.

The replicate is a run. Runs of different prompt lengths are interleaved in rounds, shuffled within each
round, because machines drift: what is compared should be measured side by side. Every shape of work is
warmed up first, untimed and marked, since llama.cpp repacks weights and touches memory on first use.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from lab import catalog, machine, phases, prompts, record, results
from lab.errors import LabError
from lab.plan import DEFAULT_GEN, DEFAULT_LENGTHS, Plan, make_plan
from lab.progress import Reporter, Watch
from lab.record import Noise, Record, Run, Settings, Steps
from lab.worker import Worker, WorkerDied

N_WARMUP_TOKENS = 4
"""Tokens that a warm-up generates: some backends record their graphs at the second or third step."""

MAX_CRASHES = 2
"""After so many deaths of the engine in runs of one prompt length, that length is given up."""

_BLOCK = 1 << 20


def measure(
    prompt_len: str | Sequence[int] = DEFAULT_LENGTHS,
    gen: int = DEFAULT_GEN,
    repeat: int = 3,
    model: str = catalog.DEFAULT,
    *,
    out: str | Path = "results",
    watch: Watch | None = None,
    stream: bool = False,
    **settings: object,
) -> list[Record]:
    """Measure and return the records, which are also in a new file in `out` (one line a run).

    `watch` is called with a `Status` several times a second; with `stream` it holds the generated text.
    `settings` are those of `make_plan`: prompt, seed, threads, threads_batch, batch, ubatch, n_gpu_layers,
    flash_attn, cache_type_k, cache_type_v. Failed runs are records too: look at `record.run.status`.
    """
    with Worker() as worker:
        plan = make_plan(worker, prompt_len, gen, repeat, model, **settings)  # type: ignore[arg-type]
        path = new_results_file(plan, Path(out))
        return list(execute(plan, worker, path, watch or (lambda status: None), stream))


def new_results_file(plan: Plan, folder: Path) -> Path:
    """Create the session's file, and find out now whether the runs will have room in it."""
    n_steps = sum(-(-n // plan.settings.n_ubatch) + plan.n_gen for _, n in plan.order)
    n_bytes = 70 * n_steps + 4000 * (len(plan.order) + 2 * len(plan.lengths))
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    where = machine.label(plan.machine, plan.settings.n_gpu_layers).partition(",")[0]
    path = folder / f"{now}-{machine.slug(plan.model.name)}-{machine.slug(where)}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            for first in range(0, n_bytes, _BLOCK):
                file.write(bytes(min(_BLOCK, n_bytes - first)))
            file.flush()
            os.fsync(file.fileno())
            file.truncate(0)
    except OSError as problem:
        if not isinstance(problem, FileExistsError):
            with contextlib.suppress(OSError):
                path.unlink()
        raise LabError(
            f"Results cannot be written to {folder}: {problem.strerror} (about {n_bytes:,} bytes are needed).",
            "Choose another folder: --out FOLDER",
        ) from None
    return path


def execute(plan: Plan, worker: Worker, path: Path, watch: Watch, stream: bool = False) -> Iterator[Record]:
    """Make the plan's runs, each appended to `path` the moment it ends, and yield their records.

    A length that fails is reported in its record and the others go on. When the engine dies it is started
    again. Whoever stops iterating (Ctrl-C) keeps everything that has been yielded.
    """
    session = path.stem
    if stream and plan.file.source == catalog.SYNTHETIC:
        raise LabError("A model with random weights has no text to stream.", "Leave --stream out.")
    try:
        bench = _Bench(plan, worker, watch, stream)
        for settings, run in _runs(bench):
            line = Record(session, plan.machine, bench.model, settings, run)
            _append(path, line)
            yield line
    finally:
        if path.exists() and path.stat().st_size == 0:
            path.unlink()


def _runs(bench: _Bench) -> Iterator[tuple[Settings, Run]]:
    plan, todo = bench.plan, bench.todo
    for n_prompt, reason in plan.refused.items():
        yield plan.settings, _failed_run(plan, n_prompt, 0, LabError(reason))
    crashes: collections.Counter[int] = collections.Counter()

    def give_up(n_prompt: int) -> None:
        todo[:] = [(repeat, n) for repeat, n in todo if n != n_prompt]

    while todo:
        if not bench.warm:
            bench.load()
            longest = max(n for _, n in todo)
            try:
                bench.open(longest + plan.n_gen)
            except LabError as problem:  # the longest length decides the size: that one did not work
                give_up(longest)
                yield bench.settings, _failed_run(plan, longest, 0, problem)
                bench.recover(problem)
                continue
            try:
                yield from bench.warm_up()
            except LabError as problem:
                crashes[longest] += 1
                given_up = not isinstance(problem, WorkerDied) or crashes[longest] >= MAX_CRASHES
                if given_up:
                    give_up(longest)
                yield bench.settings, _failed_run(plan, longest, 0, problem, warmup=not given_up)
                bench.recover(problem)
            continue
        repeat, n_prompt = todo.pop(0)
        try:
            yield bench.settings, bench.run(n_prompt, repeat)
        except LabError as problem:
            crashes[n_prompt] += 1
            if not isinstance(problem, WorkerDied) or crashes[n_prompt] >= MAX_CRASHES:
                give_up(n_prompt)
            yield bench.settings, _failed_run(plan, n_prompt, repeat, problem)
            bench.recover(problem)


class _Bench:
    """The engine with the plan's model and a warm context."""

    def __init__(self, plan: Plan, worker: Worker, watch: Watch, stream: bool) -> None:
        self.plan, self.worker, self.stream = plan, worker, stream
        self.todo = plan.order
        self.reporter = Reporter(watch, self.todo, plan.n_gen)
        self.settings, self.model = plan.settings, plan.model
        self.warm = False
        self._loaded = False
        self._ids: list[int] = []
        self._pieces: list[bytes] = []

    def load(self) -> None:
        """Load the model, where it is not loaded."""
        if self._loaded:
            return
        if self.model.sha256 is None:
            self.reporter.tell("checking the model file")
            self.model = dataclasses.replace(self.model, sha256=catalog.sha256(self.plan.file.path))
        self.reporter.tell("loading the model")
        self._vocabulary = self.worker.load(self.plan.file.path, self.plan.settings.n_gpu_layers)
        if self.plan.prompt.text is not None:
            self._ids = self.worker.tokenize(self.plan.prompt.text)
            if not self._ids:
                raise LabError(f"The prompt {self.plan.prompt.name} has no token in this model.", "Use another text.")
        if self.stream:
            self._pieces = self.worker.pieces()
        self._loaded = True

    def open(self, n_ctx: int) -> None:
        """Make a context of so many tokens."""
        self.reporter.tell("making room", n_ctx - self.plan.n_gen)
        self.settings = self.worker.new_context(dataclasses.replace(self.plan.settings, n_ctx=n_ctx))

    def warm_up(self) -> Iterator[tuple[Settings, Run]]:
        """One short run for every shape of step that is still to come."""
        n_ubatch = self.settings.n_ubatch
        shapes = {n if n <= n_ubatch else n_ubatch + n % n_ubatch for _, n in self.todo}
        for n_prompt in sorted(shapes):
            yield self.settings, self.run(n_prompt, 0, warmup=True)
        self.warm = True

    def run(self, n_prompt: int, repeat: int, warmup: bool = False) -> Run:
        """One run on the open context."""
        plan = self.plan
        n_gen = min(plan.n_gen, N_WARMUP_TOKENS) if warmup else plan.n_gen
        prompt, offset = self._prompt(n_prompt, repeat)
        started_at = _utc_now()
        look = self.reporter.onlooker(n_prompt, n_gen, repeat, warmup, self._pieces)
        before = machine.read_noise()
        steps, token_ids, end_at = self.worker.run(prompt, n_gen, look)
        run = Run(
            n_prompt=n_prompt,
            n_gen=n_gen,
            repeat=repeat,
            warmup=warmup,
            started_at=started_at,
            status=record.OK,
            error=None,
            steps=steps,
            token_ids=token_ids,
            prompt_offset=offset,
            end_of_generation_at=end_at,
            noise=Noise(before, machine.read_noise()),
        )
        if sum(steps.n_tokens[: phases.n_prefill_steps(run)]) != n_prompt:
            raise LabError(f"The steps do not add up to {n_prompt} prompt tokens.", "Please report this as a bug.")
        self.reporter.learn(run)
        return run

    def recover(self, problem: LabError) -> None:
        """After a failure: a dead engine is started again; one that only refused can go on."""
        if isinstance(problem, WorkerDied):
            self.worker.restart()
            self.warm = self._loaded = False

    def _prompt(self, n_prompt: int, repeat: int) -> tuple[list[int], int | None]:
        seed, bos = self.plan.settings.seed, self._vocabulary.bos
        if self.plan.prompt.text is None:
            return prompts.random_ids(n_prompt, self._vocabulary.n_vocab, bos, seed, repeat), None
        offset = prompts.offset(seed, repeat, len(self._ids))
        return prompts.cut(self._ids, n_prompt, offset, bos), offset


def _failed_run(plan: Plan, n_prompt: int, repeat: int, problem: LabError, warmup: bool = False) -> Run:
    return Run(
        n_prompt=n_prompt,
        n_gen=plan.n_gen,
        repeat=repeat,
        warmup=warmup,
        started_at=_utc_now(),
        status=record.CRASHED if isinstance(problem, WorkerDied) else record.FAILED,
        error=str(problem),
        steps=Steps(),
        token_ids=(),
        prompt_offset=None,
        end_of_generation_at=None,
        noise=None,
    )


def _append(path: Path, line: Record) -> None:
    """Append, and where the disk has filled up meanwhile, save the run elsewhere before giving up."""
    try:
        results.append(path, line)
    except OSError as problem:
        rescue = Path(tempfile.gettempdir()) / path.name
        what = f"The results file {path} cannot be written any more: {problem.strerror or problem}."
        try:
            results.append(rescue, line)
        except OSError:
            raise LabError(
                what, f"The runs before this one are in it. This one could not be saved in {rescue} either."
            ) from None
        raise LabError(what, f"The runs before this one are in it; this one is saved in {rescue}.") from None


def _utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
