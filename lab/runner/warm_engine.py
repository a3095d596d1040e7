"""An engine with a loaded model and a warm context, which watches every run for noise.

Before and after every timed run it reads the state of the system and times a sentinel (a short
decode that is always the same). During the run it samples other processes' CPU use and energy
counters ten times a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from lab.core import phases, record, script as scripts, stored_command
from lab.core.asked_settings import END
from lab.core.record import Noise, Record, Run, Settings
from lab.core.script import Script
from lab.errors import LabError
from lab.process.wire import Outcome, Progress
from lab.process.worker import Worker, WorkerDied
from lab.runner import checksums, disturbances, noise_watch, prompts
from lab.runner.cases import Case, Plan, measured_run, named, utc_now, with_room
from lab.runner.diagnosis import DIAGNOSIS_S, Diagnosed, diagnose
from lab.runner.forecast import DECODE_KINDS
from lab.runner.progress import Reporter, Status

N_WARMUP_TOKENS = 4  # some backends record their graphs at the second or third step
N_WARMUP_PROMPT = 32  # tokens of the first warm-up on a CPU

FULL_WARMUP_S = 2.0
"""On a CPU the warm-up includes a full step if that takes less time than this.

The first full step touches the pages of the compute buffer: about 5,000 page faults for a step of
512 tokens of SmolLM2 (tests/bench/warm_up.py). On one Xeon the first such prefill took 20 ms longer
than the next ones, which is 1 % of the longest step that is warmed up.
"""

N_SENTINEL = 8  # decode steps of a sentinel that count
N_SENTINEL_SKIPPED = 2  # its first steps, which do not count
MAX_CRASHES = 2  # after which a case is abandoned, if they may be chance
STATUS_S = 0.5  # interval of showing the progress; drawing it needs a core


class WarmEngine:
    """The engine with the plan's model and a warm context."""

    def __init__(
        self,
        plan: Plan,
        worker: Worker,
        reporter: Reporter,
        stream: bool = False,
        n_starts: int = 1,
    ) -> None:
        self.plan = plan
        self.worker = worker
        self.reporter = reporter
        self.stream = stream
        self.settings = plan.settings
        self.model = plan.model
        self.warm = False
        self.has_computed = False  # since its process started
        self.has_warmed_up = False
        self.round = -1  # the repeat for which the engine was started
        self.n_starts = n_starts
        self.diagnosed: Diagnosed | None = None  # the first crash of native code
        self.added: tuple[str, ...] = ()  # the options that the session added to the command
        self._loaded = False
        self._first_look: noise_watch.NoiseWatch | None = (
            None  # until the first warm-up has ended
        )
        self._has_looked = False
        self._sentinel_ns: int | None = None  # of the last one, on this context
        self._text_ids: dict[str, list[int]] = {}  # token ids of every text, by name
        self._pieces: list[bytes] = []

    def load(self) -> None:
        """Load the model, if it is not loaded."""
        if self._loaded:
            return
        plan = self.plan
        if self.model.sha256 is None:
            self.reporter.report_status("checking the model file")
        checksum = checksums.checked(plan.file.paths, self.model.sha256)
        self.model = dataclasses.replace(self.model, sha256=checksum)
        self.worker.use(plan.setup)
        self.reporter.report_status("loading the model")
        draft_path = plan.draft.file.path if plan.draft else None
        if not self._has_looked:
            self._has_looked = True
            self._first_look = noise_watch.NoiseWatch(self.worker.pid)
        with self._explained(N_WARMUP_PROMPT):
            self._vocabulary = self.worker.load(plan.file.path, plan.settings, draft_path)
        self.model = dataclasses.replace(self.model, description=self._vocabulary.description)
        for source in {plan.prompt, *map(self._source, plan.cases)}:
            self._tokenize(source)
        if self.stream:
            self._pieces = self.worker.pieces()
        self._loaded = True

    def _tokenize(self, source: prompts.Source) -> None:
        if source.text is None:
            return
        token_ids = self.worker.tokenize(source.text)
        if not token_ids:
            message = f"The prompt {source.name} gives no tokens in this model."
            raise LabError(message, "Use another text.")
        self._text_ids[source.name] = token_ids

    def renew(self) -> None:
        """Start a new engine, without a model."""
        self.worker.restart()
        self.n_starts += 1
        self.warm = False
        self.has_computed = False
        self.has_warmed_up = False
        self._loaded = False

    def open(self, cases: Sequence[Case]) -> None:
        """Create a context that is large enough for each of these cases."""
        longest = max(cases, key=lambda case: case.n_prompt)
        self.reporter.report_status("creating the context", longest)
        self._sentinel_ns = None
        with self._explained(N_WARMUP_PROMPT):
            self.settings = self.worker.new_context(with_room(self.plan.settings, cases))
        self._placement = self.worker.placement()

    def warm_up(self, cases: Collection[Case]) -> Iterator[Run]:
        """Warm-up runs, which load the caches and code paths that the cases use; none for cold
        cases."""
        cases = [case for case in cases if not case.is_cold]
        if cases:
            yield from self._warm_up(cases)
            self.has_warmed_up = True
        self.warm = True
        self._tell_of_neighbours()

    def _warm_up(self, cases: Collection[Case]) -> Iterator[Run]:
        prompt_lengths: set[int] = set()  # that are prefilled in one go
        for case in cases:
            every = case.every or case.n_prompt
            prompt_lengths |= {min(case.n_prompt, every), case.n_prompt % every or every}
        n_gen = min(N_WARMUP_TOKENS, max(case.n_gen for case in cases))
        if self.settings.n_gpu_layers:
            yield from self._warm_up_devices(cases, prompt_lengths, n_gen)
        else:
            yield from self._warm_up_cpu(max(prompt_lengths), n_gen)

    def can_run(self, case: Case) -> bool:
        """Whether a case may run in this process: a cold one alone, others after a warm-up."""
        return not self.has_computed if case.is_cold else self.has_warmed_up

    def _tell_of_neighbours(self) -> None:
        """Before the first run: say if another program needs a core that the threads need."""
        if self._first_look is None:
            return
        seen = disturbances.seen_before(
            self._first_look.finish(), self.plan.machine, self.model, self.settings
        )
        self._first_look = None
        if seen:
            self.reporter.watch(Status(seen, note=seen))

    def _warm_up_devices(
        self, cases: Collection[Case], prompt_lengths: set[int], n_gen: int
    ) -> Iterator[Run]:
        """A run for every shape of step, because backends record a graph for each."""
        n_ubatch = self.settings.n_ubatch
        shortest: set[int] = set()  # prompts with the same shapes of steps
        for n_prompt in prompt_lengths:
            shortest.add(n_prompt if n_prompt <= n_ubatch else n_ubatch + n_prompt % n_ubatch)
        for n_prompt in sorted(shortest):
            yield self.run(Case(n_prompt, n_gen), 0, warmup=True)
        for case in cases:
            if case.experiment:
                yield self.run(case, 0, warmup=True)

    def _warm_up_cpu(self, longest_prompt: int, n_gen: int) -> Iterator[Run]:
        """A short run, and a full step if that is quick enough."""
        n_step = min(self.settings.n_ubatch, longest_prompt)
        short = self.run(Case(min(N_WARMUP_PROMPT, n_step), n_gen), 0, warmup=True)
        yield short
        prefill_s = (phases.prefill_ns(short) or 0) / 1e9
        full_step_s = prefill_s * n_step / short.n_prompt
        if short.n_prompt < n_step and full_step_s < FULL_WARMUP_S:
            yield self.run(Case(n_step, 1), 0, warmup=True)

    def run(self, case: Case, repeat: int, warmup: bool = False) -> Run:
        """One run on the open context."""
        script = self._script(case, repeat)
        started_at = utc_now()
        with self._explained(case.n_prompt):
            outcome, noise = self._watched(script, case, repeat, warmup)
        run = Run(
            **named(case),
            repeat=repeat,
            warmup=warmup,
            started_at=started_at,
            status=record.OK,
            **vars(outcome),
            noise=noise,
            engine=self.n_starts,
            placement=self._placement,
        )
        check_tokens(script, run, case)
        self._learn(case, run)
        return run

    def _script(self, case: Case, repeat: int) -> Script:
        write = self.plan.write if case.experiment else measured_run
        text = functools.partial(self._text, self._source(case), repeat)
        script = write(case, text, self.settings)
        if self.settings.prefill_wait == END:
            return scripts.wait_once(script)
        return script

    def _learn(self, case: Case, run: Run) -> None:
        """Tell the forecast what the run took."""
        steps = run.steps
        prefill_ns = 0
        decode_ns = 0
        for kind, start, end in zip(steps.kind, steps.start_ns, steps.end_ns, strict=True):
            if kind in DECODE_KINDS:
                decode_ns += end - start
            else:
                prefill_ns += end - start
        n_chosen = self.plan.n_tokens(case)[1]
        self.reporter.learn(case, prefill_ns, decode_ns, n_chosen, run.warmup)

    def _watched(
        self, script: Script, case: Case, repeat: int, warmup: bool
    ) -> tuple[Outcome, Noise]:
        """Run a script between two sentinels (not in a warm-up, nor of a cold case), and record the
        noise."""
        has_sentinels = not (warmup or case.is_cold)
        if has_sentinels and self._sentinel_ns is None:
            self._sentinel_ns = self._time_sentinel()
        sentinel_before_ns = self._sentinel_ns
        show = self.reporter.progress_watcher(case, repeat, warmup, self._pieces)
        watch = noise_watch.NoiseWatch(self.worker.pid)
        watches = [watch, *([self._first_look] if self._first_look else [])]
        self.has_computed = True
        outcome = self.worker.run(script, _sampling(watches, show))
        show(Progress(scripts.n_prefilled(script), outcome.token_ids))
        noise = watch.finish()
        if not has_sentinels:
            return outcome, noise
        try:
            self._sentinel_ns = self._time_sentinel()
        except LabError:  # this run is complete; the next one reports the dead engine
            self._sentinel_ns = None
        noise = dataclasses.replace(
            noise, sentinel_before_ns=sentinel_before_ns, sentinel_after_ns=self._sentinel_ns
        )
        return outcome, noise

    def record(self, session: str, run: Run, settings: Settings | None = None) -> Record:
        """A run as a line of a results file, with the plan's fields."""
        plan = self.plan
        run = dataclasses.replace(run, part=plan.part)
        return Record(
            session,
            plan.machine,
            self.model,
            settings or self.settings,
            run,
            draft_model=plan.draft.model if plan.draft else None,
            command=self._command(),
        )

    def _command(self) -> tuple[str, ...] | None:
        """The command that asked for the session, with what a crash made it add."""
        command = stored_command.command()
        return None if command is None else (*command, *self.added)

    @contextlib.contextmanager
    def _explained(self, n_prompt: int) -> Iterator[None]:
        """Diagnose the first crash of native code, and raise it as Diagnosed."""
        try:
            yield
        except WorkerDied as death:
            if self.diagnosed or not death.is_native_crash:
                raise
            limit = f"at most {DIAGNOSIS_S:.0f} s"
            self.reporter.report_status(f"{death.what} Looking for the cause ({limit})")
            self.diagnosed = diagnose(self.worker, self.plan, n_prompt, death)
            raise self.diagnosed from None

    @property
    def most_crashes(self) -> int:
        """Crashes after which a case is abandoned: 1 if the diagnosis says that they repeat."""
        return 1 if self.diagnosed and self.diagnosed.is_lasting else MAX_CRASHES

    def adopt_change(self, problem: LabError) -> str | None:
        """Change to the setting that a diagnosis found, and announce it. Returns the message, if
        there is one."""
        if not isinstance(problem, Diagnosed) or problem.change is None:
            return None
        self.plan = dataclasses.replace(
            self.plan, settings=problem.change.of(self.plan.settings)
        )
        self.settings = self.plan.settings
        option = problem.change.option
        self.added = tuple(option.split())
        message = (
            f"{problem.what} The session continues with {option}, which you did not ask for."
        )
        self.reporter.watch(Status(message, note=message))
        return message

    def _time_sentinel(self) -> int:
        """The median time of the same few decode steps on an empty context, in ns."""
        n_gen = min(N_SENTINEL + N_SENTINEL_SKIPPED, self.settings.n_ctx)
        prompt = self._text(self.plan.prompt, 0, 0, 1)
        steps = self.worker.run(scripts.run(prompt, n_gen, 1), lambda progress: None).steps
        stamps = zip(steps.start_ns, steps.ready_ns, strict=True)
        times_ns = [ready - start for start, ready in stamps]
        return round(statistics.median(times_ns[N_SENTINEL_SKIPPED:] or times_ns))

    def _source(self, case: Case) -> prompts.Source:
        """The source of a case's prompts."""
        return self.plan.prompt if case.text is None else prompts.source(case.text)

    def _text(self, source: prompts.Source, repeat: int, sequence: int, n: int) -> list[int]:
        """A prompt of n tokens; the prompts of a run's sequences begin at different places."""
        seed = self.plan.seed
        bos = self._vocabulary.bos
        if source.text is None:
            return prompts.random_ids(n, self._vocabulary.n_vocab, bos, seed, repeat, sequence)
        text_ids = self._text_ids[source.name]
        offset = prompts.offset(seed, repeat, len(text_ids), sequence)
        return prompts.cut(text_ids, n, offset, bos)


def _sampling(
    watches: Sequence[noise_watch.NoiseWatch], show: Callable[[Progress], None]
) -> Callable[[Progress], None]:
    """A function to call with a run's progress: it samples the noise, and shows the progress now
    and then."""
    shown_at = time.monotonic()

    def look(progress: Progress) -> None:
        nonlocal shown_at
        for watch in watches:
            watch.sample()
        if time.monotonic() - shown_at >= STATUS_S:
            shown_at = time.monotonic()
            show(progress)

    return look


def check_tokens(script: Script, run: Run, case: Case) -> None:
    """LabError unless the steps of a run have the tokens of its script."""
    # Those of an open-ended operation follow
    n_planned_steps = len(list(scripts.shapes(script)))
    n_planned = 0
    for operation in script:
        n_planned += operation.times * operation.n_tokens
    if sum(run.steps.n_tokens[:n_planned_steps]) != n_planned:
        raise LabError(f"The steps do not add up to {case.name}.", "This is a bug of the lab.")
