"""An engine with a loaded model and a warm context, which watches every run for noise.

Before and after every timed run it reads the state of the system and times a sentinel (a short decode that is always
the same). During the run it samples other processes' CPU use and energy counters ten times a second.

A signal says that llama.cpp crashed, not why. So after the first crash the lab repeats a small job (load the model,
make a context, read and generate a few tokens), first unchanged, then with one setting changed. It names a cause only
if the job runs with the change and then crashes again without it. Each trial runs in a new process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lab.core import asked_command, phases, record, script as scripts
from lab.core.asked_settings import END
from lab.core.record import Noise, Record, Run, Settings
from lab.core.script import Script
from lab.errors import LabError
from lab.models import catalog
from lab.process.wire import MUL_MAT, Outcome, Probe, Progress
from lab.process.worker import Worker, WorkerDied
from lab.runner import noise_watch, prompts
from lab.runner.builds import BUILD_HERE
from lab.runner.cases import Case, Plan, measured_run, named, utc_now, with_room
from lab.runner.progress import Reporter, Status

N_WARMUP_TOKENS = (
    4  # that a warm-up generates: some backends record their graphs at the second or third step
)
N_WARMUP_PROMPT = 32  # tokens of the first warm-up on a CPU

FULL_WARMUP_S = 2.0
"""On a CPU the warm-up includes a full step if that takes less time than this.

The first full step touches the pages of the compute buffer: about 5,000 page faults for a step of 512 tokens of SmolLM2
(tests/bench/warm_up.py). On one Xeon the first such prefill took 20 ms longer than the next ones, which is 1 % of the
longest step that is warmed up.
"""

PLACED_BY = (
    *("devices", "split_mode", "main_gpu", "tensor_split", "n_cpu_moe", "override_tensor"),
    "prefill_wait",
)
"""The settings that mean nothing without layers on devices."""

N_SENTINEL = 8  # decode steps of a sentinel that count, after one that does not
MAX_CRASHES = 2  # after which a case is abandoned, if they may be chance
STATUS_S = 0.5  # interval of showing the progress; drawing it needs a core
SECONDS = 30.0
TRIAL_S = 10.0  # limits of a diagnosis, and of each of its trials


@dataclass(frozen=True)
class Change:
    """A change that avoids a part of llama.cpp: the option, the fields of Settings, and the part in words."""

    option: str
    fields: dict[str, object]
    avoids: str

    def of(self, settings: Settings) -> Settings:
        return dataclasses.replace(settings, **self.fields)  # type: ignore[arg-type]


class Diagnosed(WorkerDied):
    """A crash with its diagnosis; further runs will crash too (`is_lasting`) without the `change`, if one was found."""

    def __init__(
        self,
        death: WorkerDied,
        found: str,
        hint: str,
        is_lasting: bool = True,
        change: Change | None = None,
    ):
        super().__init__(f"{death.what} {found}", hint, death.status)
        self.is_lasting = is_lasting
        self.change = change


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
        self.round = -1  # the repeat for which the engine was started
        self.n_starts = n_starts
        self.diagnosed: Diagnosed | None = (
            None  # the first crash of native code, with its diagnosis
        )
        self._loaded = False
        self._sentinel: int | None = None  # the time of the last one, on this context
        self._ids: dict[str, list[int]] = {}  # token ids of every text, by name
        self._pieces: list[bytes] = []

    def load(self) -> None:
        """Load the model, if it is not loaded."""
        if self._loaded:
            return
        if self.model.sha256 is None:
            self.reporter.report_status("checking the model file")
            self.model = dataclasses.replace(self.model, sha256=catalog.sha256(self.plan.file.path))
        self.worker.use(self.plan.lib, self.plan.settings.rpc or ())
        self.reporter.report_status("loading the model")
        draft = self.plan.draft
        with self._explained(N_WARMUP_PROMPT):
            self._vocabulary = self.worker.load(
                self.plan.file.path, self.plan.settings, draft.file.path if draft else None
            )
        self.model = dataclasses.replace(self.model, description=self._vocabulary.description)
        for source in {self._source(case) for case in self.plan.cases} | {self.plan.prompt}:
            if source.text is not None:
                self._ids[source.name] = self.worker.tokenize(source.text)
                if not self._ids[source.name]:
                    raise LabError(
                        f"The prompt {source.name} gives no tokens in this model.",
                        "Use another text.",
                    )
        if self.stream:
            self._pieces = self.worker.pieces()
        self._loaded = True

    def renew(self) -> None:
        """Start a new engine, without a model."""
        self.worker.restart()
        self.n_starts += 1
        self.warm = self._loaded = False

    def open(self, cases: Sequence[Case]) -> None:
        """Create a context that is large enough for each of these cases."""
        self.reporter.report_status(
            "creating the context", max(cases, key=lambda case: case.n_prompt)
        )
        self._sentinel = None
        with self._explained(N_WARMUP_PROMPT):
            self.settings = self.worker.new_context(with_room(self.plan.settings, cases))
        self._placement = self.worker.placement()

    def warm_up(self, cases: Collection[Case]) -> Iterator[Run]:
        """Warm-up runs: on a GPU one for every shape of step of these cases; on a CPU a short run and a full step."""
        parts: set[int] = set()
        for case in cases:
            n = case.n_prompt
            every = case.every or case.n_prompt
            parts |= {min(n, every), n % every or every}
        n_ubatch = self.settings.n_ubatch
        n_gen = min(N_WARMUP_TOKENS, max(case.n_gen for case in cases))
        if self.settings.n_gpu_layers:
            shapes = {n if n <= n_ubatch else n_ubatch + n % n_ubatch for n in parts}
            for case in [
                *(Case(n, n_gen) for n in sorted(shapes)),
                *(case for case in cases if case.experiment),
            ]:
                yield self.run(case, 0, warmup=True)
        else:
            n_step = min(n_ubatch, max(parts))
            short = self.run(Case(min(N_WARMUP_PROMPT, n_step), n_gen), 0, warmup=True)
            yield short
            step_s = (phases.prefill_ns(short) or 0) / 1e9 * n_step / short.n_prompt
            if short.n_prompt < n_step and step_s < FULL_WARMUP_S:
                yield self.run(Case(n_step, 1), 0, warmup=True)
        self.warm = True

    def run(self, case: Case, repeat: int, warmup: bool = False) -> Run:
        """One run on the open context."""
        write = self.plan.write if case.experiment else measured_run
        script = write(
            case, functools.partial(self._text, self._source(case), repeat), self.settings
        )
        if self.settings.prefill_wait == END:
            script = scripts.wait_once(script)
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
        n_known = len(list(scripts.shapes(script)))  # the steps of `speculate` follow
        n_computed = sum(
            operation.times * part.n_tokens for operation in script for part in operation.parts
        )
        if sum(outcome.steps.n_tokens[:n_known]) != n_computed:
            raise LabError(f"The steps do not add up to {case.name}.", "This is a bug of the lab.")
        steps = run.steps
        prefill_ns = 0
        decode_ns = 0
        for kind, start, end in zip(steps.kind, steps.start_ns, steps.end_ns, strict=True):
            if kind in (record.DECODE, record.DRAFT, record.VERIFY):
                decode_ns += end - start
            else:
                prefill_ns += end - start
        self.reporter.learn(case, prefill_ns, decode_ns, self.plan.n_tokens(case)[1])
        return run

    def _watched(
        self, script: Script, case: Case, repeat: int, warmup: bool
    ) -> tuple[Outcome, Noise]:
        """Run a script between two sentinels (not in a warm-up), and record the noise."""
        if not warmup and self._sentinel is None:
            self._sentinel = self._time_sentinel()
        sentinel_before = self._sentinel
        show = self.reporter.progress_watcher(case, repeat, warmup, self._pieces)
        shown = time.monotonic()
        noise = noise_watch.NoiseWatch(self.worker.pid)

        def look(progress: Progress) -> None:
            nonlocal shown
            noise.sample()
            if time.monotonic() - shown >= STATUS_S:
                shown = time.monotonic()
                show(progress)

        outcome = self.worker.run(script, look)
        show(Progress(scripts.n_prefilled(script), outcome.token_ids))
        readings = noise.finish()
        if warmup:
            return outcome, readings
        try:
            self._sentinel = self._time_sentinel()
        except LabError:  # this run is complete; the next one reports the dead engine
            self._sentinel = None
        return outcome, dataclasses.replace(
            readings, sentinel_before_ns=sentinel_before, sentinel_after_ns=self._sentinel
        )

    def record(self, session: str, run: Run, settings: Settings | None = None) -> Record:
        """A run as a line of a results file, with the plan's fields."""
        plan = self.plan
        run = dataclasses.replace(run, part=plan.part, tuning=plan.tuning)
        return Record(
            session,
            plan.machine,
            self.model,
            settings or self.settings,
            run,
            draft_model=plan.draft.model if plan.draft else None,
            command=asked_command.command(),
        )

    @contextlib.contextmanager
    def _explained(self, n_prompt: int) -> Iterator[None]:
        """Diagnose the first crash of native code, and raise it as Diagnosed."""
        try:
            yield
        except WorkerDied as death:
            if self.diagnosed or not death.is_crash:
                raise
            self.reporter.report_status(
                f"{death.what} Looking for the cause (at most {SECONDS:.0f} s)"
            )
            self.diagnosed = diagnose(self.worker, self.plan, n_prompt, death)
            raise self.diagnosed from None

    @property
    def most_crashes(self) -> int:
        """Crashes after which a case is abandoned: 1 if the diagnosis says that they repeat."""
        return 1 if self.diagnosed and self.diagnosed.is_lasting else MAX_CRASHES

    def mend(self, problem: LabError) -> str:
        """Change to the setting that a diagnosis found, and announce it. Returns the message; "" without a change."""
        if not isinstance(problem, Diagnosed) or problem.change is None:
            return ""
        self.plan = dataclasses.replace(self.plan, settings=problem.change.of(self.plan.settings))
        self.settings = self.plan.settings
        words = f"{problem.what} The session continues with {problem.change.option}, which you did not ask for."
        self.reporter.watch(Status(words, note=words))
        return words

    def _time_sentinel(self) -> int:
        """The median time of the same few decode steps on an empty context, in ns."""
        n = min(N_SENTINEL + 2, self.settings.n_ctx)
        prompt = self._text(self.plan.prompt, 0, 0, 1)
        steps = self.worker.run(scripts.run(prompt, n, 1), lambda progress: None).steps
        times = [ready - start for start, ready in zip(steps.start_ns, steps.ready_ns, strict=True)]
        return round(statistics.median(times[2:] or times))

    def _source(self, case: Case) -> prompts.Source:
        """The source of a case's prompts."""
        return self.plan.prompt if case.text is None else prompts.source(case.text)

    def _text(self, source: prompts.Source, repeat: int, sequence: int, n: int) -> list[int]:
        """A prompt of n tokens; the prompts of a run's sequences begin at different places."""
        seed = self.plan.seed
        bos = self._vocabulary.bos
        offset = self._offset(source, repeat, sequence)
        if offset is None:
            return prompts.random_ids(n, self._vocabulary.n_vocab, bos, seed, repeat, sequence)
        return prompts.cut(self._ids[source.name], n, offset, bos)

    def _offset(self, source: prompts.Source, repeat: int, sequence: int) -> int | None:
        """Where in the tokenized text the prompt of a sequence begins; None for random prompts."""
        if source.text is None:
            return None
        return prompts.offset(self.plan.seed, repeat, len(self._ids[source.name]), sequence)


def diagnose(worker: Worker, plan: Plan, n_prompt: int, death: WorkerDied) -> Diagnosed:
    """Why the engine crashed with a plan's settings. Leaves the worker without a model."""
    until = time.monotonic() + SECONDS

    def runs(settings: Settings | None = plan.settings) -> bool | None:
        """Whether the small job (None: a plain product) runs in a new process; None if it did not end, or failed."""
        if (seconds := min(TRIAL_S, until - time.monotonic())) <= 0:
            return None
        worker.restart()
        try:
            with worker.ended_after(seconds):
                if settings:
                    small_job(worker, plan, settings, min(n_prompt, plan.settings.n_ubatch))
                else:  # with weights of the model's most common type, without repacking
                    kind = max(
                        plan.model.tensor_bytes, key=lambda kind: plan.model.tensor_bytes[kind]
                    )
                    worker.probe(
                        Probe(MUL_MAT, kind, 64, 256, None, 32, 1, 1, None, 0.0, repack=False)
                    )
        except WorkerDied as end:
            return False if end.is_crash else None
        except LabError:
            return None
        return True

    if (again := runs()) is not False:
        found = f"The cause was not found: a small job of the same kind did not end within {TRIAL_S:.0f} s."
        if again:
            found = "A small job of the same kind ran afterwards: the crash did not repeat."
        hint = f"Measure again. If it crashes again, build llama.cpp here: {BUILD_HERE}"
        return Diagnosed(death, found, hint, False)
    hint = f"Build llama.cpp here: {BUILD_HERE}"
    if runs(None) is False:
        found = "A plain matrix product on the CPU with one thread crashes too: this build does not run on this CPU."
        return Diagnosed(death, found, hint)
    known = changes(plan.settings)
    for change in known:
        if runs(change.of(plan.settings)) and runs() is False:
            found = f"The cause is {change.avoids}: a small job runs with {change.option}, and crashed in the same way "
            found += "before and after that without it."
            return Diagnosed(
                death,
                found,
                f"Add {change.option}, or build llama.cpp here: {BUILD_HERE}",
                True,
                change,
            )
    found = f"A small job crashes in the same way, also with each of {', '.join(change.option for change in known)}."
    if time.monotonic() > until:
        found = (
            f"A small job crashes in the same way. The cause was not found within {SECONDS:.0f} s."
        )
    return Diagnosed(death, found, hint)


def changes(settings: Settings) -> list[Change]:
    """The changes that differ from these settings, that of the device first."""
    none = dict.fromkeys(PLACED_BY)
    known = [
        Change("--n-gpu-layers 0", {"n_gpu_layers": 0, **none}, "the device of the layers"),
        Change(
            "--no-repack", {"repack": False}, "the repacked layouts of weights (AMX, CPU_REPACK)"
        ),
        Change("--flash-attn off", {"flash_attn": "off"}, "flash attention"),
        Change("--threads 1", {"n_threads": 1, "n_threads_batch": 1}, "several threads"),
        Change("--no-mmap", {"mmap": False}, "memory mapping of the model's file"),
    ]
    if settings.type_v not in ("f16", "bf16", "f32"):  # other V caches need flash attention
        del known[2]
    return [
        change for change in known[not settings.n_gpu_layers :] if change.of(settings) != settings
    ]


def small_job(worker: Worker, plan: Plan, settings: Settings, n_prompt: int) -> None:
    """Load the model, make a context, read `n_prompt` tokens in one step and generate a few."""
    vocabulary = worker.load(plan.file.path, settings, plan.draft.file.path if plan.draft else None)
    worker.new_context(dataclasses.replace(settings, n_ctx=n_prompt + N_WARMUP_TOKENS, n_seq_max=1))
    tokens = prompts.random_ids(n_prompt, vocabulary.n_vocab, vocabulary.bos, plan.seed, 0)
    worker.run(scripts.run(tokens, N_WARMUP_TOKENS, n_prompt), lambda progress: None)
