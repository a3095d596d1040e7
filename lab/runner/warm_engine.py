"""An engine with a plan's model loaded and a warm context, and every run on it watched for noise.

Around every timed run stand two readings of the system and two sentinels (a short decode that is always the
same); while it lasts the parent samples what other processes take, ten times a second.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Collection, Iterator
from datetime import UTC, datetime

from lab.core import record
from lab.core.record import Run, Settings, Steps
from lab.errors import LabError
from lab.models import catalog
from lab.process.worker import Progress, Worker, WorkerDied
from lab.runner import noise_watch, prompts
from lab.runner.plan import Plan
from lab.runner.progress import Reporter

N_WARMUP_TOKENS = 4
"""Tokens that a warm-up generates: some backends record their graphs at the second or third step."""

N_WARMUP_PROMPT = 32
"""Prompt tokens of the warm-up on a CPU."""

N_SENTINEL = 8
"""Decode steps of a sentinel that count; one before them does not."""

STATUS_S = 0.5
"""How often the progress is shown: rarely, since drawing it needs a core."""


class WarmEngine:
    """The engine with the plan's model and a warm context."""

    def __init__(self, plan: Plan, worker: Worker, reporter: Reporter, stream: bool = False) -> None:
        self.plan, self.worker, self.reporter, self.stream = plan, worker, reporter, stream
        self.settings, self.model = plan.settings, plan.model
        self.warm = False
        self.round = -1  # the repeat for which the engine was started
        self.n_starts = 1
        self._loaded = False
        self._sentinel: int | None = None  # the last one's time, on this context
        self._ids: list[int] = []
        self._pieces: list[bytes] = []

    def load(self) -> None:
        """Load the model, where it is not loaded."""
        if self._loaded:
            return
        if self.model.sha256 is None:
            self.reporter.report_status("checking the model file")
            self.model = dataclasses.replace(self.model, sha256=catalog.sha256(self.plan.file.path))
        self.reporter.report_status("loading the model")
        self._vocabulary = self.worker.load(self.plan.file.path, self.plan.settings.n_gpu_layers)
        self.model = dataclasses.replace(self.model, description=self._vocabulary.description)
        if self.plan.prompt.text is not None:
            self._ids = self.worker.tokenize(self.plan.prompt.text)
            if not self._ids:
                raise LabError(f"The prompt {self.plan.prompt.name} has no token in this model.", "Use another text.")
        if self.stream:
            self._pieces = self.worker.pieces()
        self._loaded = True

    def renew(self) -> None:
        """Start a fresh engine, without a model."""
        self.worker.restart()
        self.n_starts += 1
        self.warm = self._loaded = False

    def open(self, n_ctx: int) -> None:
        """Make a context of so many tokens."""
        self.reporter.report_status("making room", n_ctx - self.plan.n_gen)
        self._sentinel = None
        self.settings = self.worker.new_context(dataclasses.replace(self.plan.settings, n_ctx=n_ctx))

    def warm_up(self, lengths: Collection[int]) -> Iterator[tuple[Settings, Run]]:
        """On a GPU one short run for every shape of step that prompts of these lengths have; on the CPU a single one.

        GPU backends compile kernels and record graphs by shape. On the CPU the first run of a shape that was not warmed
        up is as fast as the next ones (tests/bench/warm_up.py).
        """
        n_ubatch, every = self.settings.n_ubatch, self.plan.every
        parts = (
            set(lengths) if every is None else {min(n, every) for n in lengths} | {n % every or every for n in lengths}
        )
        shapes = {n if n <= n_ubatch else n_ubatch + n % n_ubatch for n in parts}
        if self.settings.n_gpu_layers == 0:
            shapes = {min(N_WARMUP_PROMPT, max(shapes))}
        for n_prompt in sorted(shapes):
            yield self.settings, self.run(n_prompt, 0, warmup=True)
        self.warm = True

    def run(self, n_prompt: int, repeat: int, warmup: bool = False) -> Run:
        """One run on the open context."""
        plan = self.plan
        n_gen = min(plan.n_gen, N_WARMUP_TOKENS) if warmup else plan.n_gen
        every = None if warmup else plan.every
        prompt, offset = self._prompt(n_prompt, repeat)
        if not warmup and self._sentinel is None:
            self._sentinel = self._time_sentinel()
        sentinel_before = self._sentinel
        started_at = utc_now()
        show = self.reporter.progress_watcher(
            n_prompt, n_gen if every is None else plan.n_generated, repeat, warmup, self._pieces
        )
        shown = time.monotonic()
        noise = noise_watch.NoiseWatch(self.worker.pid)

        def look(progress: Progress) -> None:
            nonlocal shown
            noise.sample()
            if time.monotonic() - shown >= STATUS_S:
                shown = time.monotonic()
                show(progress)

        steps, token_ids, end_at = self.worker.run(prompt, n_gen, look, every)
        show(Progress(n_prompt, token_ids))
        readings = noise.finish()
        if not warmup:
            try:
                self._sentinel = self._time_sentinel()
            except LabError:  # this run is measured; a dead engine is reported by the next one
                self._sentinel = None
            readings = dataclasses.replace(
                readings, sentinel_before_ns=sentinel_before, sentinel_after_ns=self._sentinel
            )
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
            noise=readings,
            every=every,
            engine=self.n_starts,
        )
        if sum(n for kind, n in zip(steps.kind, steps.n_tokens, strict=True) if kind == record.PREFILL) != n_prompt:
            raise LabError(f"The steps do not add up to {n_prompt} prompt tokens.", "Please report this as a bug.")
        self.reporter.learn(run)
        return run

    def recover(self, problem: LabError) -> None:
        """After a failure: a dead engine is started again; one that only refused can go on."""
        if isinstance(problem, WorkerDied):
            self.renew()

    def _time_sentinel(self) -> int:
        """The median time of the same few decode steps on an empty context, in ns."""
        prompt, _ = self._prompt(1, 0)
        steps, _, _ = self.worker.run(prompt, min(N_SENTINEL + 2, self.settings.n_ctx), lambda progress: None)
        times = [ready - start for start, ready in zip(steps.start_ns, steps.ready_ns, strict=True)]
        return round(statistics.median(times[2:] or times))

    def _prompt(self, n_prompt: int, repeat: int) -> tuple[list[int], int | None]:
        seed, bos = self.plan.seed, self._vocabulary.bos
        if self.plan.prompt.text is None:
            return prompts.random_ids(n_prompt, self._vocabulary.n_vocab, bos, seed, repeat), None
        offset = prompts.offset(seed, repeat, len(self._ids))
        return prompts.cut(self._ids, n_prompt, offset, bos), offset


def failed_run(plan: Plan, n_prompt: int, repeat: int, problem: LabError, warmup: bool = False) -> Run:
    """The run that `problem` prevented."""
    return Run(
        n_prompt=n_prompt,
        n_gen=plan.n_gen,
        repeat=repeat,
        warmup=warmup,
        started_at=utc_now(),
        status=record.CRASHED if isinstance(problem, WorkerDied) else record.FAILED,
        error=str(problem),
        steps=Steps(),
        token_ids=(),
        prompt_offset=None,
        end_of_generation_at=None,
        noise=None,
        every=plan.every,
    )


def utc_now() -> str:
    """This moment, as records have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
