"""The command that puts load on a server: load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli.options import OUTPUT, PROMPT, SEED, with_options
from lab.cli.running import EXIT_FAILED, EXIT_INTERRUPTED
from lab.cli.servers import REACHING, SERVED_MODEL, confirm
from lab.core.lists import plural
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.analysis.loads import Sample
    from lab.runner.load_plan import LoadPlan
    from lab.runner.progress import ShowStatus, Status
    from lab.runner.servers import Server


@click.command()
@with_options(
    click.option("--url", required=True, metavar="URL", help="A server of OpenAI's API: http://127.0.0.1:8080/v1"),
    click.option("--concurrency", "-c", help="Users who each send the next request when an answer is there: 1,4,16."),
    click.option(
        "--rate", metavar="LIST", help="Instead: requests per second, sent whatever the server does: 0.5,1,2."
    ),
    click.option(
        "--arrivals",
        type=click.Choice(["poisson", "constant"]),
        default="poisson",
        show_default=True,
        help="With --rate: at random times, as of people who know nothing of each other, or evenly.",
    ),
    click.option(
        "--replay",
        metavar="FILE",
        help="Lengths and times from a JSONL file: n_prompt, n_gen, at_s, or a Mooncake trace. With --concurrency or "
        "--rate only its lengths.",
    ),
    click.option(
        "--prompt-len",
        "-p",
        default="256",
        show_default=True,
        help="Tokens: 256, 100-1000, normal:500,100 or lognormal:300,0.8 (median, sigma of the logarithm).",
    ),
    click.option("--gen", "-n", default="64", show_default=True, help="Tokens of each answer, likewise."),
    click.option("--warmup", type=float, help="Seconds before the steady window.  [default: 5; 0 of a replay]"),
    click.option("--duration", type=float, help="Seconds of the steady window.  [default: 15; a replay's own]"),
    click.option("--rounds", type=int, help="How often each load is measured.  [default: 3; 1 of a replay]"),
    click.option("--slo", metavar="LIMITS", help="Limits that a good answer keeps: ttft=1s,tpot=50ms,e2e=10s."),
    click.option(
        "--max-requests",
        default=2000,
        show_default=True,
        help="Never send more. Small ones that look at the server and size prompts do not count.",
    ),
    click.option("--timeout", default=300.0, show_default=True, help="Seconds after which a request is given up."),
    PROMPT,
    SERVED_MODEL,
    *REACHING,
    SEED,
    *OUTPUT[:3],  # without --report: pages have no loads
    click.option("--dry-run", is_flag=True, help="Show the loads and how long they take, and send nothing."),
)
def load(
    url: str,
    model: str | None,
    api: str | None,
    api_key_env: str | None,
    header: tuple[str, ...],
    yes: bool,
    prompt: str,
    out: str,
    as_json: bool,
    no_plot: bool,
    dry_run: bool,
    **asked: Any,
) -> None:
    """Put load on the server at --url, of many users or many requests, and see what becomes of latency and rates.

    Without options: 1, 2, 4 and 8 users, about four minutes. Each round measures every load once, in random order: a
    warm-up, then the steady window; its last requests end under the same load. Each request is a line of a new file
    in --out. Failures are figures here: exit status 0 when any request went well, 1 when none did or the server is
    gone, 130 after Ctrl-C, which keeps what had ended and shows the rounds that are whole.
    """
    from lab.runner import loading
    from lab.runner.load_plan import make_plan
    from lab.runner.servers import connect
    from lab.runner.through_server import prompt_text
    from lab.show import console, text_endpoint

    err = console.console(stderr=True)

    def note(sentence: str) -> None:
        err.print(f"Note: {sentence}", style="yellow")

    plan = make_plan(**asked)
    text = prompt_text(prompt)
    for sentence in plan.notes:
        note(sentence)
    if dry_run:
        _print_plan(plan, as_json)
        return
    confirm(url, f"at most {plural(plan.n_most, 'request')}, and small ones to learn what it can do", yes)
    with connect(url, model, api, api_key_env, header, plan.timeout_s, err.print) as server:
        text_endpoint.print_endpoint(
            server.endpoint, server.model, server.models, err if as_json else console.console()
        )
        path = loading.new_results_file(plan, server, Path(out))

        def requests(watch: ShowStatus) -> Generator[Any, None, None]:
            return loading.execute(plan, server, text, path, watch, note)

        samples, problem = _collect(requests, path, err)
    _show(samples, server, path, as_json, not no_plot)
    if isinstance(problem, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    if problem:
        raise problem
    if not any(one.figures.status == "ok" for one in samples):
        sys.exit(EXIT_FAILED)


def _collect(
    requests: Callable[[ShowStatus], Generator[Any, None, None]], path: Path, err: Any
) -> tuple[list[Sample], LabError | KeyboardInterrupt | None]:
    """Measures with progress. Returns a sample of each request, and what ended it early, if anything did.

    After Ctrl-C the samples are of all that is in the file.
    """
    from lab.analysis import loads
    from lab.core import results

    samples: list[Sample] = []
    try:
        with _progress(err) as watch, closing(requests(watch)) as running:
            for record in running:
                samples.append(loads.sample(record.request))
    except LabError as problem:
        return samples, problem
    except KeyboardInterrupt as interrupt:
        kept = results.read([path]).requests if path.exists() else ()
        n = len(kept)
        err.print(
            f"\nInterrupted. {n:,} request{'s' * (n != 1)} in {path}" if n else "\nInterrupted: nothing had ended."
        )
        return [loads.sample(record.request) for record in kept], interrupt
    return samples, None


@contextmanager
def _progress(err: Any) -> Iterator[ShowStatus]:
    """A bar on a terminal; elsewhere a line for each window when it is over, and one for what comes before."""
    from lab.runner.progress import duration
    from lab.show import console

    with console.progress(err, None, str) as (watch, _):
        if err.is_terminal:
            yield watch
            return
        last: Status | None = None

        def plain(status: Status) -> None:
            nonlocal last
            if last and last.part and last.part != status.part:
                left = f"; about {duration(last.left_s)} left" if last.left_s else ""
                err.print(f"{last.words}{left}")
            begins = status.doing.partition(",")[0]
            if not status.part and (last is None or begins != last.doing.partition(",")[0]):
                err.print(f"{begins} ...")
            last = status

        yield plain
        if last and last.part:
            err.print(last.words)


def _show(samples: list[Sample], server: Server, path: Path, as_json: bool, plots: bool) -> None:
    """Prints the table, then draws: drawing may fail."""
    from lab.show import canvas, console, text_load

    if not samples:
        return
    out = console.console()
    files: dict[str, Any] = {"session": path.stem, "results": str(path), "plots": []}
    if not as_json:
        text_load.print_load(samples, server.endpoint, out)
        out.print(f"\nresults  {path}")
    if plots:
        from lab.show import plot_load

        title = plot_load.title(server.endpoint, server.model_name, server.machine)
        settings = server.endpoint.settings
        drawings = plot_load.drawings(samples, title, settings.n_slots if settings else None)
        for name, draw in drawings.items():
            for plot in canvas.write(draw, path.parent, f"{path.stem}-{name}", plot_load.size(name)):
                files["plots"].append(str(plot))
                if not as_json:
                    out.print(f"plot     {plot}")
    if as_json:
        console.print_json({**files, **text_load.as_rows(samples, server.endpoint)})


def _print_plan(plan: LoadPlan, as_json: bool) -> None:
    """What would be sent."""
    from lab.runner.progress import duration
    from lab.show import console

    arms = list(dict.fromkeys(window.load.words for window in sorted(plan.windows, key=_level)))
    load = plan.windows[0].load
    rounds = len(plan.windows) // len(arms)
    if as_json:
        known = {"loads": arms, "rounds": rounds, "warmup_s": load.warmup_s, "duration_s": load.duration_s}
        known |= {"lengths": load.lengths, "max_requests": plan.n_most, "seconds": plan.seconds}
        console.print_json({**known, "order": [window.words for window in plan.windows]})
        return
    out = console.console()
    out.print(f"loads    {', '.join(arms)}; in {rounds} round{'s' * (rounds != 1)}")
    out.print(f"lengths  {load.lengths}")
    out.print(f"windows  {load.warmup_s:g} s of warm-up and {load.duration_s:g} s that count, each")
    out.print(f"order    {'; '.join(window.words for window in plan.windows)}")
    out.print(f"at most  {plural(plan.n_most, 'request')}")
    out.print(f"takes    {duration(plan.seconds)}, and what the last requests of each window take")


def _level(window: Any) -> float:
    return float(window.load.concurrency or window.load.rate or 0)
