"""`lab tune`: the fastest settings for a workload on this machine, with a proof.

The search (result.py) says what to measure block by block, in fresh engines. At last the winner is measured side by
side with the default, in blocks that chose nothing. All of this fits into a budget of time; about half of it is kept
for the confirmation. Settings that the user gave stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import click

from lab.app import experiment
from lab.app.experiment import Option
from lab.app.help import Command
from lab.app.options import DURATION, OUTPUT, SEED, SETTINGS, TOKENS, seconds_of, with_options
from lab.app.output import Output
from lab.app.reading import note
from lab.app.running import collect, introduce, runs_in
from lab.core import shell
from lab.core.asked_settings import check_number, defaults, table
from lab.core.payloads import Tuning
from lab.core.record import Model, Record
from lab.errors import LabError
from lab.features.tune import result
from lab.features.tune.result import CONFIRM, DEFAULT, SEARCH, Choice, Phase, Search, Tuned
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import as_options, batches, machine, progress, trial as side_by_side
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from lab.runner.progress import Reporter, ShowStatus
from lab.runner.session import new_results_file

DEFAULT_BUDGET = "10min"
MOST_CHOICES = 600
N_SEARCH_GEN = (
    48  # tokens that a run of the search generates at most: its time per token stands for the rest
)
FOR_CONFIRMATION = 0.5
FEWEST_TRIED = 3
"""Share of the budget that is kept for the confirmation, once this many choices were tried."""

OVER_BUDGET = 0.05  # share by which the budget may be exceeded, because times are estimated
MOST_CONFIRMED = 12  # blocks of the confirmation, as the budget allows: blocks until a gain shows would find noise
GOAL = (
    "Minimize the time of the whole request, to the first token (ttft) or per further token (tpot), or maximize the "
    "tokens per second of all users."
)
LOSSY = "Also try settings that change what the model writes: cache types and other quantizations."
UBATCHES = (64, 128, 256, 512, 1024, 2048)


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
    prompt_len: Annotated[int, Option("Prompt tokens of your requests.", "-p", type=TOKENS)] = 1000,
    gen: Annotated[int, Option("Tokens that an answer has.", "-n", type=TOKENS)] = 200,
    model: str = catalog.DEFAULT,
    *,
    goal: Annotated[str, Option(GOAL, type=click.Choice(tuple(result.GOALS)))] = result.REQUEST,
    users: Annotated[int, Option("Requests that are answered together, as in lab batch.")] = 1,
    budget: Annotated[
        str | float, Option("Time to spend, such as 2min, 90s or 1h.", type=DURATION)
    ] = DEFAULT_BUDGET,
    allow_lossy: Annotated[bool, Option(LOSSY)] = False,
    **settings: Any,
) -> TunePlan:
    """The fastest settings for requests of prompt_len + gen tokens, within a budget of time.

        found = lab.tune(2000, 300, budget="5min")
        lab.show_tuned(found)  # what was tried, and what is recommended
        lab.measure("2000", 300, **found.settings)

    `goal`: the time of the whole request, until the first token (ttft), per further token (tpot), or the tokens per
    second of all `users` (throughput). Settings that are given stay fixed. LabError if nothing is left to choose, or if
    the default cannot be measured.
    """
    budget_s = seconds_of(budget)
    asked = dict(settings)
    if goal not in result.GOALS:
        raise LabError(f"--goal {goal} is not known.", f"Choose one of {', '.join(result.GOALS)}.")
    if goal == result.TPOT and gen < 2:
        raise LabError("--goal tpot needs at least two generated tokens.", "Use --gen 2 or more.")
    check_number("users", users, batches.MOST_SEQUENCES)

    def make(worker: Worker, choice: Choice, stage: str) -> Plan:
        changed = {**asked, "model": model, **dict(choice)}
        if (
            "threads" in dict(choice)
            and "threads_batch" not in dict(choice)
            and not asked.get("threads_batch")
        ):
            changed["threads_batch"] = base.settings.n_threads_batch  # see `variant`
        n_gen = min(gen, N_SEARCH_GEN) if stage == SEARCH else gen
        if users > 1:
            made = batches.plan(worker, str(users), prompt_len, max(2, n_gen), 1, **changed)
        else:
            made = make_plan(worker, [prompt_len], n_gen, 1, **changed)
        return dataclasses.replace(
            made, tuning=Tuning(goal, stage, gen), n_repeat=1, is_more_if_cheap=False
        )

    base = make(worker, (), CONFIRM)
    searched = make(worker, (), SEARCH)
    if base.refused:
        raise LabError(" ".join(base.refused.values()), "Use a shorter prompt or a smaller model.")

    def is_possible(name: str, value: Any) -> bool:
        """Whether a setting alone can be planned and changes something: some builds, machines and models refuse it."""
        with contextlib.suppress(LabError):
            made = make(worker, ((name, value),), SEARCH)
            return not made.refused and (made.settings, made.file) != (
                searched.settings,
                searched.file,
            )
        return False

    given = {name for name, value in asked.items() if name in table() and value != defaults()[name]}
    space = [
        [(name, value) for value in values if is_possible(name, value)]
        for name, values in sorted(
            _space(base, allow_lossy).items(), key=lambda one: (one[0] in result.LOSSY, one[0])
        )
        if name not in given
    ]
    every = itertools.chain.from_iterable(  # those with the fewest changes first
        itertools.product(*chosen)
        for n in range(1, len(space) + 1)
        for chosen in itertools.combinations(space, n)
    )
    packed = ("flash_attn", "off")  # llama.cpp packs values only with flash attention
    possible = (one for one in every if not (packed in one and "cache_type_v" in dict(one)))
    of = result.phases_of(goal, gen, users > 1)
    choices = Search(list(itertools.islice(possible, MOST_CHOICES)), of).choices[1:]
    if not choices:
        raise LabError(
            "There is no setting left to choose.",
            "Give fewer settings: those that you give stay fixed.",
        )
    return TunePlan(budget_s, base, make, tuple(choices), of)


def _space(base: Plan, allow_lossy: bool) -> dict[str, list[Any]]:
    """The values to try of each setting: what this machine and this model can have."""
    now = base.settings
    n_layer = base.model.n_layer or 0
    devices = machine.used(base.machine, base.settings)
    usable = max(1, int(machine.n_cores_usable() or now.n_threads))
    is_on_cpu = len(devices) == 0 or now.n_gpu_layers <= n_layer
    n_tokens = base.cases[0].n_prompt * max(1, len(base.cases[0].sequences))
    ubatches = {
        min(n, n_tokens): n for n in reversed(UBATCHES) if n <= now.n_batch
    }  # by the size of the largest step

    def threads(n: int) -> list[int]:
        """Other numbers: a quarter, half, one less, and all cores that the process may use."""
        return (
            sorted({one for one in (n // 4, n // 2, n - 1, usable) if one >= 1} - {n})
            if is_on_cpu
            else []
        )

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
    return (
        shell.join(
            *(word for name, value in named.items() for word in as_options.option(name, value))
        )
        or DEFAULT
    )


def execute(
    made: TunePlan,
    worker: Worker,
    path: Path,
    watch: ShowStatus,
    new_worker: Callable[[], Worker] = Worker,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Record]:
    """Search, then confirm the winner: yields the record of each run after it was appended to `path`."""
    search = Search(made.choices, made.phases)
    chance = random.Random(made.default.seed)
    started = clock()
    models = dict[str, Model]()
    whole_s = dict[Choice, float]({(): 0.0})  # seconds of a whole request, by choice
    number = 0
    n_tried = 0
    slowest_s = 0.0
    n_more = max(0, made.default.cases[0].n_gen - N_SEARCH_GEN)

    def left_s() -> float:
        return made.budget_s - (clock() - started)

    def can_try(n_runs: int) -> bool:
        """Whether the budget allows more runs beside the confirmation, which has half of it or more."""
        keep_s = 2 * result.FEWEST_CONFIRMED * whole_s[()]
        keep_s = keep_s if keep_s <= made.budget_s else 0.0  # nothing can be confirmed
        if n_tried >= FEWEST_TRIED:
            keep_s = max(keep_s, FOR_CONFIRMATION * made.budget_s)
        return left_s() - keep_s >= n_runs * slowest_s

    def block(choices: Sequence[Choice], stage: str) -> Iterator[Record]:
        """A run of each choice side by side in fresh engines."""
        plans = {
            variant(choice, made.default): made.make(worker, choice, stage) for choice in choices
        }
        for name, plan in plans.items():
            plans[name] = dataclasses.replace(
                plan, model=models.get(str(plan.file.path), plan.model)
            )
        if len(plans) > 1:
            side_by_side.check(plans)
        todo = [(0, case) for plan in plans.values() for case in plan.cases]

        def show(status: progress.Status) -> None:
            part = f"{'searching' if stage == SEARCH else 'confirming'}, block {number + 1}"
            watch(dataclasses.replace(status, part=part, n_runs=0, left_s=max(0.0, left_s())))

        reporter = Reporter(show, todo, made.default.n_tokens)
        trial = side_by_side.Trial(plans, path, reporter, todo, chance, new_worker)
        yield from trial.block(number, n_turns=1)
        models.update(
            (str(plan.file.path), plan.model) for plan in plans.values()
        )  # with its checksum

    while (wanted := search.next_block()) and (not number or can_try(2)):
        for n, choice in enumerate(wanted):
            if n and not can_try(1):
                break
            begun = clock()
            found = None
            try:
                for record in block([choice], SEARCH):
                    if record.run.error:
                        search.drop(choice, record.run.error)
                    found = result.timing(record, choice) or found
                    yield record
            except LabError as problem:  # the plan is impossible
                search.drop(choice, str(problem))
            if () in search.dropped:
                raise LabError(
                    f"The default cannot be measured: {search.dropped[()]}",
                    "Try it alone: lab measure",
                )
            run_s = clock() - begun
            slowest_s = max(slowest_s, run_s)
            n_tried = n_tried + bool(choice)
            if found:
                search.timings.append(found)
                whole_s[choice] = max(
                    whole_s.get(choice, 0.0), run_s + n_more * found.seconds.get(result.DECODE, 0.0)
                )
        number += 1

    winner = search.best()
    spare_s = OVER_BUDGET * made.budget_s
    n_confirmed = 0
    block_s = whole_s[()] + whole_s.get(winner or (), max(whole_s.values()))
    if not winner or left_s() + spare_s < result.FEWEST_CONFIRMED * block_s:
        return
    while n_confirmed < MOST_CONFIRMED and left_s() + spare_s >= block_s:
        for record in block([(), winner], CONFIRM):
            yield record
            if record.run.error:
                return
        number = number + 1
        n_confirmed = n_confirmed + 1


def carry_out(make: Callable[[Worker], TunePlan], out: str | Path, watch: Any = None) -> Tuned:
    """Plan, search and confirm."""
    with (
        Worker() as worker,
        contextlib.nullcontext(watch) if watch else progress.in_notebook() as look,
    ):
        made = make(worker)
        path = new_results_file(made.default, Path(out))
        found = result.tuned(list(execute(made, worker, path, look)))
    if found is None:
        raise LabError("The default could not be measured.", "Try it alone: lab measure")
    return found


tune: Callable[..., Tuned] = cast(Any, experiment.public("tune", plan, carry_out=carry_out))


@click.command("tune", cls=Command, first=("prompt-len", "gen", "model", "goal", "budget", "save"))
@with_options(
    *experiment.options(plan).values(),
    click.option(
        "--save", metavar="NAME", help="Save the recommended settings; --settings NAME uses them."
    ),
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
    from lab.features.quant.comparing import known_lines
    from lab.show import console

    if save is not None:
        as_options.path_of(save)  # an odd name is known before the search, not after it
    output = Output.taken_from(asked)
    err = console.console(stderr=True)
    with Worker() as worker:
        with console.transfer(err) as transferring:
            made = plan(worker, **asked, watch=transferring)
        introduce([made.default], err, err)
        path = new_results_file(made.default, output.folder)

        def so_far(records: Sequence[Any], path: Path) -> str:
            """What Ctrl-C prints: where the runs are, and the best settings so far."""
            found = [f" {' '.join(result.sentences(one))}" for one in result.of_sessions(records)]
            return f"{kept}.{''.join(found)}" if (kept := runs_in(records, path)) else ""

        records, problem = collect(
            lambda watch: execute(made, worker, path, watch), path, err, where=so_far
        )
    output.finish(records, path, problem)
    if asked["allow_lossy"] and not output.as_json:
        for line in known_lines(output.folder, records):
            click.echo(line)
    found = result.tuned(records) if save else None
    if save and (found is None or found.winner is None or not found.is_recommended):
        what = f"Nothing is saved as {save}: no settings are recommended."
        raise LabError(what, "Keep the default, or search longer: --budget 30min")
    if save and found and found.winner:
        kept = as_options.save(save, as_options.asked(found.winner.settings))
        model = dict(found.choice).get("model")
        options = shell.join("--settings", save, *(["--model", model] if model else []))
        note(f"The settings are saved as {kept}: {options} uses them.")
