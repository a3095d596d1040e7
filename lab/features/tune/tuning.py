"""`lab tune`: the fastest settings for a workload on this machine, with a proof.

The search of search.py says what to measure block by block, in fresh engines. At last the winner is measured side by
side with the default, in blocks that chose nothing. All of this fits into a budget of time; about half of it is kept
for the confirmation. Settings that the user gave stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import click

from lab.cli.help import Command
from lab.cli.options import OUTPUT, SEED, SETTINGS, TOKENS, with_options
from lab.core import shell
from lab.core.asked_settings import check_number, defaults, table
from lab.core.payloads import Tuning
from lab.core.record import Record
from lab.errors import LabError
from lab.features import batch as batching
from lab.features.compare import side_by_side
from lab.features.experiment import Keywords, for_plan
from lab.features.running import Output, collect, introduce, note, runs_in
from lab.features.tune import result
from lab.features.tune.result import CONFIRM, DECODE, DEFAULT, FEWEST_CONFIRMED, REQUEST, SEARCH, Tuned
from lab.features.tune.search import Choice, Phase, Search
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import as_options, machine, progress
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from lab.runner.progress import Reporter, ShowStatus
from lab.runner.session import new_results_file

DEFAULT_BUDGET = "10min"
MOST_CHOICES = 600
N_SEARCH_GEN = 48
"""Generated tokens of a run in the search, at most: its time per token stands for that of the whole answer."""

FOR_CONFIRMATION = 0.5
"""Share of the budget that is kept for the confirmation."""

FEWEST_TRIED = 3
"""Choices that are tried even if less than FOR_CONFIRMATION is left then."""

OVER_BUDGET = 0.1
"""Share by which the budget may be exceeded, because times are estimated."""

MOST_CONFIRMED = 12
"""Blocks of the confirmation. Their number is fixed before they begin: adding blocks until a gain shows finds noise."""

UBATCHES = (64, 128, 256, 512, 1024, 2048)


def seconds_of(budget: str | float) -> float:
    """A budget such as `10min`, `90s`, `1h` or a number of seconds. LabError for anything else, and below 10 s."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,3})?)\s*(s|min|m|h|)\s*", str(budget))
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}[match[2]] if match else 0.0
    if not 10 <= seconds <= 86400:
        raise LabError(f"--budget {budget} is not possible.", "Give a time from 10s to 24h, such as 10min.")
    return seconds


@dataclass(frozen=True)
class TunePlan:
    """What will be searched. `make` makes the plan of a choice in a stage."""

    budget_s: float
    default: Plan  # of the whole request
    make: Callable[[Worker, Choice, str], Plan]
    choices: tuple[Choice, ...]
    phases: tuple[Phase, ...]


def plan(
    worker: Worker,
    /,
    prompt_len: int = 1000,
    gen: int = 200,
    model: str = catalog.DEFAULT,
    *,
    goal: str = REQUEST,
    users: int = 1,
    budget: str | float = DEFAULT_BUDGET,
    allow_lossy: bool = False,
    **settings: Unpack[Keywords],
) -> TunePlan:
    """What `tune` will search. LabError for impossible numbers, and if nothing is left to choose."""
    budget_s, asked = seconds_of(budget), for_plan(settings)
    if goal not in result.GOALS:
        raise LabError(f"--goal {goal} is not known.", f"Choose one of {', '.join(result.GOALS)}.")
    if goal == result.TPOT and gen < 2:
        raise LabError("--goal tpot needs at least two generated tokens.", "Use --gen 2 or more.")
    check_number("users", users, batching.MOST_SEQUENCES)

    def make(worker: Worker, choice: Choice, stage: str) -> Plan:
        changed = {**asked, "model": model, **dict(choice)}
        if "threads" in dict(choice) and "threads_batch" not in dict(choice) and not asked.get("threads_batch"):
            changed["threads_batch"] = base.settings.n_threads_batch  # see `variant`
        n_gen = min(gen, N_SEARCH_GEN) if stage == SEARCH else gen
        if users > 1:
            made = batching.plan(worker, str(users), prompt_len, max(2, n_gen), 1, **changed)
        else:
            made = make_plan(worker, [prompt_len], n_gen, 1, **changed)
        return dataclasses.replace(made, tuning=Tuning(goal, stage, gen), n_repeat=1, is_more_if_cheap=False)

    base = make(worker, (), CONFIRM)
    if base.refused:
        raise LabError(" ".join(base.refused.values()), "Use a shorter prompt or a smaller model.")
    searched = make(worker, (), SEARCH)

    def is_possible(name: str, value: Any) -> bool:
        """Whether a setting alone can be planned and changes something: some builds, machines and models refuse it."""
        with contextlib.suppress(LabError):
            made = make(worker, ((name, value),), SEARCH)
            return not made.refused and (made.settings, made.file) != (searched.settings, searched.file)
        return False

    given = {name for name, value in asked.items() if name in table() and value != defaults()[name]}
    space = {
        name: [value for value in values if is_possible(name, value)]
        for name, values in sorted(_space(base, allow_lossy).items())
        if name not in given
    }
    made = (
        tuple(zip(names, values, strict=True))
        for n_changed in range(1, len(space) + 1)  # those with the fewest changes first
        for names in itertools.combinations(space, n_changed)
        for values in itertools.product(*(space[name] for name in names))
    )
    packed = ("flash_attn", "off")  # llama.cpp packs values only with flash attention
    possible = (one for one in made if not (packed in one and "cache_type_v" in dict(one)))
    of = result.phases_of(goal, gen, users > 1)
    choices = Search(list(itertools.islice(possible, MOST_CHOICES)), of).choices[1:]
    if not choices:
        raise LabError("There is no setting left to choose.", "Give fewer settings: those that you give stay fixed.")
    return TunePlan(budget_s, base, make, tuple(choices), of)


def _space(base: Plan, allow_lossy: bool) -> dict[str, list[Any]]:
    """The values to try of each setting: what this machine and this model can have."""
    now, n_layer = base.settings, base.model.n_layer or 0
    usable = max(1, int(machine.n_cores_usable() or now.n_threads))
    devices = machine.used(base.machine, now)
    is_on_cpu = len(devices) == 0 or now.n_gpu_layers <= n_layer
    n_tokens = base.cases[0].n_prompt * max(1, len(base.cases[0].sequences))
    ubatches = {min(n, n_tokens): n for n in reversed(UBATCHES) if n <= now.n_batch}  # by the size of the largest step

    def threads(n: int) -> list[int]:
        """Other numbers: a quarter, half, one less, and all cores that the process may use."""
        return sorted({one for one in (n // 4, n // 2, n - 1, usable) if one >= 1} - {n}) if is_on_cpu else []

    space: dict[str, list[Any]] = {
        "threads": threads(now.n_threads),
        "threads_batch": threads(now.n_threads_batch),
        "ubatch": [n for size, n in ubatches.items() if size != min(now.n_ubatch, n_tokens)],
        "flash_attn": ["on"] if now.flash_attn == "off" else ["off"],
        "repack": [False] if is_on_cpu else [],
        "mmap": [False],
    }
    if devices:
        space |= {
            "n_gpu_layers": [0, n_layer // 2],
            "op_offload": [False] if now.n_gpu_layers <= n_layer or base.model.n_expert else [],
            "kv_offload": [False],
            "device": [devices[0].name] if len(devices) > 1 else [],
            "n_cpu_moe": [n_layer // 2, n_layer] if base.model.n_expert else [],
        }
    if allow_lossy:
        space |= {"cache_type_k": ["q8_0", "q4_0"], "cache_type_v": ["q8_0", "q4_0"]}
        if base.file.source in (catalog.EMBEDDED, catalog.REQUANTIZED, catalog.SYNTHETIC):
            kinds = [kind for kind in ("Q8_0", "Q4_0") if kind != base.model.quantization]
            space["model"] = [catalog.spec_of(base.model, kind) for kind in kinds]
    return space


def variant(choice: Choice, base: Plan) -> str:
    """A choice as options. Threads of decode alone name those of prefill too, which follow --threads otherwise."""
    named = dict(choice)
    if "threads" in named:
        named.setdefault("threads_batch", base.settings.n_threads_batch)
    return shell.join(*(word for name, value in named.items() for word in as_options.option(name, value))) or DEFAULT


def tune(
    prompt_len: int = 1000,
    gen: int = 200,
    model: str = catalog.DEFAULT,
    *,
    goal: str = REQUEST,
    users: int = 1,
    budget: str | float = DEFAULT_BUDGET,
    allow_lossy: bool = False,
    **settings: Unpack[Keywords],
) -> Tuned:
    """The fastest settings for requests of prompt_len + gen tokens, within a budget of time.

        found = lab.tune(2000, 300, budget="5min")
        lab.show_tuned(found)  # what was tried, and what is recommended
        lab.measure("2000", 300, **found.settings)

    `goal`: the time of the whole request, until the first token (ttft), per further token (tpot), or the tokens per
    second of all `users` (throughput). Settings that are given stay fixed. LabError if the default cannot be measured.
    """
    own: Any = {**settings, "goal": goal, "users": users, "budget": budget, "allow_lossy": allow_lossy}
    with Worker() as worker, progress.in_notebook() as watch:
        made = plan(worker, prompt_len, gen, model, **own)
        path = new_results_file(made.default, Path(settings.get("out", "results")))
        found = result.tuned(list(Session(made, worker, path, watch).confirmed()))
    if found is None:
        raise LabError("The default could not be measured.", "Try it alone: lab measure")
    return found


@dataclass
class Session:
    """A running search: `confirmed` yields the record of each run after it was appended to `path`.

    A choice that fails is dropped. LabError if the default fails.
    """

    plan: TunePlan
    worker: Worker
    path: Path
    watch: ShowStatus
    new_worker: Callable[[], Worker] = Worker
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.started, self.model, self.n_blocks = self.clock(), self.plan.default.model, 0
        self.search, self.chance = Search(self.plan.choices, self.plan.phases), random.Random(self.plan.default.seed)
        self.run_s = 0.0  # of the slowest run of the search so far, with its engine's start
        self.whole_s: dict[Choice, float] = {}  # the same of the whole request, from prefill and the time per token

    @property
    def left_s(self) -> float:
        """What is left of the budget."""
        return self.plan.budget_s - (self.clock() - self.started)

    def block_s(self, choice: Choice) -> float:
        """The expected seconds of a block of the confirmation."""
        return self.whole_s[()] + self.whole_s.get(choice, max(self.whole_s.values()))

    def confirmed(self) -> Iterator[Record]:
        """The search; then the winner and the default in as many blocks as the budget allows, if enough."""
        yield from self.searched()
        winner, budget_s = self.search.best(), self.plan.budget_s
        both: dict[str, Choice] = {DEFAULT: (), variant(winner, self.plan.default): winner}
        n_blocks = int((self.left_s + OVER_BUDGET / 2 * budget_s) / self.block_s(winner)) if winner else 0
        for _ in range(min(MOST_CONFIRMED, n_blocks) if n_blocks >= FEWEST_CONFIRMED else 0):
            if self.left_s + OVER_BUDGET * budget_s < self.block_s(winner):
                break  # the machine has become slower
            for record in self.block(both, CONFIRM):
                yield record
                if record.run.error:
                    return
            self.n_blocks += 1

    def searched(self) -> Iterator[Record]:
        """Blocks of the search, until the best choice is known or the budget of the search is spent."""
        budget_s, n_tried = self.plan.budget_s, 0

        def can_try(n_runs: int) -> bool:
            """Whether the budget allows more runs beside the confirmation, which has half of it or more."""
            keep_s = FEWEST_CONFIRMED * self.block_s(())
            if budget_s < keep_s:
                keep_s = 0.0  # nothing can be confirmed
            if n_tried >= FEWEST_TRIED:
                keep_s = max(keep_s, FOR_CONFIRMATION * budget_s)
            return self.left_s - keep_s >= n_runs * self.run_s

        while wanted := self.search.next_block():
            if self.n_blocks and not can_try(2):
                return
            for n, choice in enumerate(wanted):
                if n and not can_try(1):
                    break
                yield from self._one(choice)
                n_tried += bool(choice)
            self.n_blocks += 1

    def _one(self, choice: Choice) -> Iterator[Record]:
        """One run of one choice in an engine of its own."""
        begun, done = self.clock(), None
        try:
            for record in self.block({variant(choice, self.plan.default): choice}, SEARCH):
                if record.run.error:
                    self.search.drop(choice, record.run.error)
                elif done := result.timing(record, choice):
                    self.search.learn(done)
                yield record
        except LabError as problem:  # the plan is impossible
            self.search.drop(choice, str(problem))
        if not choice and () in self.search.dropped:
            raise LabError(f"The default cannot be measured: {self.search.dropped[()]}", "Try it alone: lab measure")
        run_s = self.clock() - begun
        self.run_s = max(self.run_s, run_s)
        if done:
            more_s = max(0, self.plan.default.cases[0].n_gen - N_SEARCH_GEN) * done.seconds.get(DECODE, 0.0)
            self.whole_s[choice] = max(self.whole_s.get(choice, 0.0), run_s + more_s)

    def block(self, choices: Mapping[str, Choice], stage: str) -> Iterator[Record]:
        """A run of each choice, by its name, side by side in fresh engines."""
        plans = {name: self.plan.make(self.worker, choice, stage) for name, choice in choices.items()}
        own = [name for name, plan in plans.items() if plan.file == self.plan.default.file]
        plans |= {name: dataclasses.replace(plans[name], model=self.model) for name in own}  # with its checksum
        if len(plans) > 1:
            side_by_side.check(plans)
        todo = [(0, case) for plan in plans.values() for case in plan.cases]

        def show(status: progress.Status) -> None:
            part = f"{'confirming' if stage != SEARCH else 'searching'}, block {self.n_blocks + 1}"
            self.watch(dataclasses.replace(status, part=part, n_runs=0, left_s=max(0.0, self.left_s)))

        reporter = Reporter(show, todo, self.plan.default.n_tokens)
        yield from side_by_side.block(plans, self.n_blocks, self.path, reporter, todo, self.chance, self.new_worker, 1)
        self.model = next((plans[name].model for name in own), self.model)


@click.command("tune", cls=Command, first=("prompt-len", "gen", "model", "goal", "budget", "save"))
@with_options(
    click.option(
        "--prompt-len", "-p", type=TOKENS, default=1000, show_default=True, help="Prompt tokens of your requests."
    ),
    click.option("--gen", "-n", type=TOKENS, default=200, show_default=True, help="Tokens that an answer has."),
    click.option(
        "--goal",
        type=click.Choice(tuple(result.GOALS)),
        default=REQUEST,
        show_default=True,
        help="Minimize the time of the whole request, to the first token (ttft) or per further token (tpot), or "
        "maximize the tokens per second of all users.",
    ),
    click.option("--users", default=1, show_default=True, help="Requests that are answered together, as in lab batch."),
    click.option("--budget", default=DEFAULT_BUDGET, show_default=True, help="Time to spend, such as 2min, 90s or 1h."),
    click.option(
        "--allow-lossy",
        is_flag=True,
        help="Also try settings that change what the model writes: cache types and other quantizations.",
    ),
    click.option("--save", metavar="NAME", help="Save the recommended settings; --settings NAME uses them."),
    *SETTINGS,
    SEED,
    *OUTPUT,
)
def command(save: str | None, **asked: Any) -> None:
    """Find the fastest settings for your requests, and prove it.

    \b
      lab tune -p 2000 -n 300
      lab tune --goal ttft --budget 3min --save quick

    Measures each setting alone, then the combinations that promise most, and then the best one again, side by side with
    the default. Only these last blocks give the gain. If nothing is faster than the default beyond noise, nothing is
    recommended. Settings that you give stay fixed.

    Every run is written to one file as soon as it ends; lab show, lab plot and lab report read it. lab show --details
    adds the command line of llama-server.
    """
    from lab.features.quant.figures import known_lines
    from lab.show import console

    if save is not None:
        as_options.path_of(save)  # an odd name is known before the search, not after it
    output, err = Output.taken_from(asked), console.console(stderr=True)
    with Worker() as worker:
        with console.transfer(err) as transferring:
            made = plan(worker, **asked, watch=transferring)
        introduce([made.default], err, err)
        path = new_results_file(made.default, output.folder)

        def so_far(records: Sequence[Any], path: Any) -> str:
            """What Ctrl-C prints: where the runs are, and the best settings so far."""
            kept = runs_in(list(records), path)
            found = [" ".join(result.sentences(one)) for one in result.of_sessions(records)]
            return " ".join([f"{kept}.", *found]) if kept else ""

        records, problem = collect(
            lambda watch: Session(made, worker, path, watch).confirmed(), path, err, where=so_far
        )
    output.finish(records, path, problem)
    if asked["allow_lossy"] and not output.as_json:
        for line in known_lines(output.folder, [one for one in records if isinstance(one, Record)]):
            click.echo(line)
    if save is None:
        return
    found = result.tuned([record for record in records if isinstance(record, Record)])
    if found is None or not found.is_recommended or found.winner is None:
        raise LabError(
            f"Nothing is saved as {save}: no settings are recommended.",
            "Keep the default, or search longer: --budget 30min",
        )
    kept = as_options.save(save, as_options.asked(found.winner.settings))
    model = dict(found.choice).get("model")
    options = shell.join("--settings", save, *(["--model", model] if model else []))
    note(f"The settings are saved as {kept}: {options} uses them.")
