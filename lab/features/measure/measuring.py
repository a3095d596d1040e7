"""What `lab.measure` and `lab.sweep` do: in process, or through a server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from lab.core.asked_settings import SettingsKeywords, flag, table
from lab.core.record import Record
from lab.errors import LabError
from lab.models import catalog
from lab.runner.cases import Until
from lab.runner.plan import DEFAULT_GEN, DEFAULT_LENGTHS, N_PILOT, make_plan
from lab.runner.progress import ShowStatus
from lab.runner.session import carry_out


class SweepKeywords(SettingsKeywords, total=False):
    """Keywords of `lab.sweep`: settings, and when to stop repeating, named as the options of the command."""

    until: float | None  # 0.02: 2 %
    max_repeats: int
    max_minutes: float | None


def measure(
    prompt_len: str | Sequence[int] | None = None,
    gen: int = DEFAULT_GEN,
    repeat: int | None = None,
    model: str | None = None,
    *,
    url: str | None = None,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    stream: bool = False,
    **settings: Any,
) -> list[Any]:
    """Measure and return the records, which are also in a new file in `out` (one line a run).

        records = lab.measure("10,1000", gen=100, threads=2)
        records = lab.measure("100,1000", gen=100, url="http://127.0.0.1:8080/v1")

    The default of `prompt_len` is "10,100,1000", with `url` "100,1000". Without `repeat` each length gets three runs,
    quick ones up to six. `watch` is called with a `Status` twice a second (with `stream` it holds the generated text);
    without one, a notebook shows a line. `settings` are those of lab/core/asked_settings.py, such as threads, device
    or flash_attn; `every` makes a sweep, and `until` (0.02: 2 %) repeats until medians are that accurate, at most
    `max_repeats` times and `max_minutes` long. Failed runs are records too (`record.run.status`), with a warning.

    With `url` the lab measures a server with OpenAI's API. `model` is then the server's name for the model (None: its
    only one), and `settings` are prompt, seed, `api` ("chat" or "completions"; None: what the server has),
    `api_key_env` (the environment variable that holds the key), `header` (a list of "NAME: VALUE") and `timeout` (the
    seconds that a request may take). LabError if no server answers.
    """
    check_side(settings, url)
    if url is not None:
        from lab.features.serve import through_server

        how = {name: settings.pop(name) for name in ONLY_SERVER if name in settings}
        plan = through_server.make_plan(prompt_len, gen, repeat, **settings)
        return through_server.measure(url, plan, model, out, watch, stream, **how)

    wanted, lengths, spec = with_until(settings), prompt_len or DEFAULT_LENGTHS, model or catalog.DEFAULT
    return carry_out(lambda worker: make_plan(worker, lengths, gen, repeat, spec, **wanted), out, watch, stream)


def sweep(
    max_len: int = 8192,
    every: int = 512,
    gen: int = 16,
    repeat: int = 3,
    model: str = catalog.DEFAULT,
    *,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **settings: Unpack[SweepKeywords],
) -> list[Record]:
    """Measure prefill and decode at many lengths in one pass through the context; returns a record for each pass.

        lab.plot_sweep(lab.sweep(4096, every=256))

    After each `every` prompt tokens the sweep generates `gen` tokens and forgets them. The other arguments are those of
    `measure`.
    """

    wanted = with_until(settings)
    return carry_out(lambda worker: make_plan(worker, [max_len], gen, repeat, model, every=every, **wanted), out, watch)


def with_until(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `measure` as `make_plan` takes them. LabError for limits that are not possible."""
    share, max_repeats, max_minutes = asked.get("until"), asked.get("max_repeats", 30), asked.get("max_minutes")
    rest = {name: value for name, value in asked.items() if name not in ("until", "max_repeats", "max_minutes")}
    if share is None:
        if max_minutes is not None:
            raise LabError("--max-minutes has an effect only with --until.", "Add --until 2%, or leave it out.")
        return rest
    if share < 1e-4:
        raise LabError(f"--until {share:.2g} is not possible.", "Give at least 0.01%, such as 2%.")
    if max_repeats < N_PILOT:
        raise LabError(f"--max-repeats {max_repeats} is too few to see the spread.", f"Allow at least {N_PILOT}.")
    return rest | {"until": Until(share, max_repeats, max_minutes)}


ONLY_SERVER = ("api", "api_key_env", "header", "timeout", "yes")
"""Parameters of `measure` that need a server."""

ONLY_ENGINE = {*table(), "settings", "every", "until", "max_repeats", "max_minutes", "keep"} - {"prompt", "seed"}
"""Parameters of `measure` that need the lab's own engine."""


def check_side(given: Iterable[str], url: str | None) -> None:
    """LabError for parameters that a server does not have, or that only a server has."""
    if not (wrong := [flag(name) for name in given if name in (ONLY_SERVER if url is None else ONLY_ENGINE)]):
        return
    these, them = (
        f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} only for",
        "it" if len(wrong) == 1 else "them",
    )
    if url is None:
        hint = "Add the server's address: --url http://127.0.0.1:8080/v1"
        raise LabError(f"{these} a server, but there is no --url.", hint)
    hint = f"Leave {them} out: a server has its own settings."
    raise LabError(f"{these} the lab's own engine, not for a server.", hint)
