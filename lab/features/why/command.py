"""`lab why`: why two figures differ, as a table of parts, a picture, and the one command that helps most."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli.help import Command
from lab.cli.options import NO_PLOT, as_json_option, out_option, with_options
from lab.core import shell
from lab.errors import LabError
from lab.show.wording import digits, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lab.core.record import Record
    from lab.features.why.parts import Answer, Part
    from lab.features.why.pasted import Setup
    from lab.runner.progress import ShowStatus
    from lab.show.section import Section

DEFAULT_BUDGET = "2min"


def why(
    a: str | Path | Setup,
    b: str | Path | Setup | None = None,
    budget: str | float = DEFAULT_BUDGET,
    model: str | None = None,
    *,
    prefill: bool = False,
    out: str | Path = "results",
    watch: ShowStatus = lambda status: None,
) -> Answer:
    """Why two speeds differ: their ratio as a product of causes. Depth and settings are measured within the budget.

        lab.why("results/mine.jsonl", "pasted.txt").parts
        lab.why("35 tokens/s", "289 tokens/s", budget=0)

    A side is a results file, a text that another program printed, or a figure in words. Without `b`, the two setups of
    `a` are compared, or its only one with the best that this machine can do. `budget=0` measures nothing. LabError for
    a text that no known program printed.
    """
    from lab.features.tune.tuning import seconds_of
    from lab.features.why import best, parts
    from lab.features.why.pasted import Setup

    given = [one for one in (a, b) if one is not None]
    if len(given) == 1 and not isinstance(a, Setup):
        groups, _ = _given(str(a))
        alone = [one for one in groups[0] if one.is_prefill == prefill]
        if len(groups) == 1 and alone:
            return best.answer(alone[-1], str(a), str(out))
    sides, known = _sides(given, prefill)
    budget_s = 0.0 if str(budget).strip() in ("0", "0s", "0.0") else seconds_of(budget)
    return parts.answer(*sides, budget_s, model=model, out=Path(out), watch=watch, others=known)


def _sides(given: Sequence[str | Path | Setup], prefill: bool) -> tuple[tuple[Setup, Setup], list[Record]]:
    """The two figures to compare, and all records that came with them."""
    from lab.features.why.pasted import Setup

    read = [([[one]], []) if isinstance(one, Setup) else _given(str(one)) for one in given]
    known = [record for _, records in read for record in records]
    groups = [read[0][0], read[1][0]] if len(read) == 2 else [[group] for group in read[0][0][:2]]
    if len(groups) < 2:
        raise LabError(
            f"{given[0]} has only one setup, so there is nothing to compare.",
            "Give a second file or figure. What limits this one: lab ceilings && lab explain FILE",
        )
    first, second = ([one for group in side for one in group] for side in groups)
    for wants_prefill in (True,) if prefill else (False, True):
        pairs = [
            (one, other)
            for one in first
            for other in second
            if one.is_prefill == other.is_prefill == wants_prefill and one is not other
        ]
        if pairs:
            return min(pairs, key=_apart), known
    figures = " and ".join("/".join(dict.fromkeys(one.counts for one in side)) for side in (first, second))
    raise LabError(f"There is no figure that both sides have: {figures}.", "Give two figures of the same phase.")


def _apart(pair: tuple[Setup, Setup]) -> float:
    """How far apart the lengths of two figures are: the nearest are compared, of equal ones the longest."""
    lengths = [(one.n_prompt or 0) + (one.n_depth or 0) + 1 for one in pair]
    is_known = all(one.n_prompt is not None for one in pair)
    return round(abs(math.log(lengths[0] / lengths[1])), 3) - 1e-9 * lengths[0] if is_known else 0.0


def _given(name: str) -> tuple[list[list[Setup]], list[Record]]:
    """The figures of a file, of stdin or of words, by setup, and the records among them."""
    from lab.features.why import pasted

    path = Path(name)
    is_file = len(name) < 4000 and path.is_file()
    begin = b""
    if is_file:
        with path.open("rb") as file:
            begin = file.read(1000)
    is_of_lab = begin.lstrip()[:1] == b"{" and (b'"session":' in begin or b'"machine":' in begin)
    if is_of_lab or path.suffix == ".html" or (len(name) < 4000 and path.is_dir()):
        return _of_records(name)
    found = pasted.read(name)
    same = [[one for one in found if one.is_prefill == is_prefill] for is_prefill in (False, True)]
    return ([found] if max(map(len, same)) < 2 else [[one] for one in max(same, key=len)]), []


def _of_records(name: str) -> tuple[list[list[Setup]], list[Record]]:
    """The figures of a results file by setup, or by session if all are of one setup."""
    from lab.features.compare import comparison, spread
    from lab.features.running import read, without_tuning
    from lab.features.why import parts, pasted
    from lab.show import request_table, table

    reading = without_tuning(read((name,)))
    measured = reading.measured
    rows = comparison.sessions_apart(request_table.measured(table.runs(measured)))
    rows = rows[rows.lever.isna()]
    if rows.empty:
        raise LabError(f"{name} has no plain run that succeeded.", "Measure some: lab measure")
    spreads, groups = spread.known_spreads(measured), list[list[pasted.Setup]]()
    for label, part in table.setups(rows):
        made = list[pasted.Setup]()
        for (n_prompt, n_gen), repeats in part.groupby(["n_prompt", "n_gen"]):
            chosen = [measured[i] for i in dict.fromkeys(repeats.run)]
            own = tuple(one for one in chosen if one in reading.records)
            first = repeats.iloc[0]
            settings = parts.of_settings(own[0]) if own else {}
            for figure, counts in (("tpot_ms", pasted.DECODE), ("prefill_s", pasted.PREFILL)):
                is_prefill, which = counts == pasted.PREFILL, figure
                if not is_prefill and not (repeats.tpot_ms > 0).any():
                    which = "decode_ms"
                if which not in repeats or not (repeats[which] > 0).any():
                    continue
                values = [value for value in repeats[which] if value > 0]
                compute = [value for value in repeats.decode_ms if value > 0] if "decode_ms" in repeats else []
                logs = [math.log(value) for value in values]
                known = spreads.get((spread.machine_of(repeats), figure)) or spread.default(first)
                made.append(
                    pasted.Setup(
                        source="lab" if own else "server",
                        tps=n_prompt / statistics.median(values) if is_prefill else 1e3 / statistics.median(values),
                        counts=counts,
                        n_prompt=int(n_prompt),
                        n_gen=int(n_gen),
                        n_depth=0,
                        prefill_s=float(repeats.prefill_s.median()) if (repeats.prefill_s > 0).any() else None,
                        model=str(first.model),
                        quantization=own[0].model.quantization if own else None,
                        settings=settings,
                        spread=math.sqrt(math.pi / 2) * statistics.stdev(logs) / math.sqrt(len(logs))
                        if len(logs) > 1
                        else None,
                        between=known.sd,
                        between_source=known.source,
                        compute_tps=1e3 / statistics.median(compute) if compute and not is_prefill else None,
                        records=own,
                        about="" if len(groups) == 0 and part.run.nunique() == rows.run.nunique() else label,
                    )
                )
        if made:
            groups.append(made)
    return groups, list(reading.records)


def sections(found: Answer) -> list[Section]:
    """The answer as a section: the two figures, the table of parts, the last sentence, and a picture."""
    from lab.show.section import WIDE, Picture, Section, tabled

    lines = [f"{letter}  {digits(one.tps):>6} tokens/s   {one.label}" for letter, one in _in_order(found)]
    slow, fast = found.letters[1], found.letters[0]
    lines.append(
        f"{slow} is {times(found.ratio)} as slow as {fast}. Of this:" if found.ratio > 1.005 else "They are equal."
    )
    columns = (
        ("part", lambda part: part.name),
        ("factor", lambda part: "-" if part.how == "unknown" else f"{part.factor:.2f}x"),
        ("range", lambda part: "{:.2f}-{:.2f}".format(*part.range) if part.half else ""),
        ("how known", lambda part: part.how),
    )
    last, command = conclusion(found)
    reasons = [f"{part.name}: {part.words}" for part in found.parts if part.words]
    return [
        Section(
            name="why",
            question="Why do these two figures differ?",
            words=lines,
            **tabled(columns, found.parts, keep_all=True),
            notes=[
                *reasons,
                *found.notes,
                "Factors multiply to the ratio. The rest has the ranges of parts and figures, combined in quadrature.",
            ],
            sentences=[last, *([f"Try: {command}"] if command else [])],
            pictures=[Picture("why", "The way from one rate to the other, part by part.", partial(draw, found), WIDE)],
            data=lambda: {"parts": [_as_dict(part) for part in found.parts]},
        )
    ]


def _in_order(found: Answer) -> list[tuple[str, Setup]]:
    return sorted(zip(found.letters, (found.fast, found.slow), strict=True), key=lambda one: one[0])


def _as_dict(part: Part) -> dict[str, Any]:
    is_known = part.how != "unknown"
    return {
        "part": part.name,
        "factor": part.factor if is_known else None,
        "low": part.range[0] if is_known and part.range else None,
        "high": part.range[1] if is_known and part.range else None,
        "how": part.how,
        "why": part.words,
    }


def conclusion(found: Answer) -> tuple[str, str]:
    """The sentence that a person would say, and the command that closes most of the gap ("" if none does)."""
    from lab.features.why import parts

    rest, slow, fast = found.rest, found.slow, found.fast
    letter = found.letters[1]
    is_open = abs(rest.log) > math.log1p(parts.LEAST if rest.half is not None else parts.LEAST_ALONE)
    is_open &= abs(rest.log) > (rest.half or 0.0)
    if not found.causes or (is_open and rest.log > found.causes[0].log):
        unknown = [part.name for part in found.parts if part.how == parts.NOT_KNOWN]
        if not is_open:
            if rest.half is None:
                return f"No cause of over {parts.LEAST_ALONE:.0%}; the figures do not say how much they vary.", ""
            return "No cause: the difference is within what sessions of a machine vary.", ""
        doubt = f" Unknown: {', '.join(unknown)}." if unknown else ""
        again = shell.lab("doctor") if not unknown else ""
        how_sure = "" if rest.range else " (range unknown)"
        return f"Most of it is not explained: {times(math.exp(abs(rest.log)))}{how_sure}.{doubt}", again
    cause = found.causes[0]
    words = f"Most of it: {cause.name} ({times(cause.factor)}{'' if cause.range else ', range unknown'})."
    if cause.name == parts.COUNTED:
        own = slow.tps * cause.factor
        how_sure = "" if cause.range else " (range unknown)"
        words = f"Most of it: {letter} {cause.words.partition(' ')[2]}. "
        words += f"Its decode alone is {digits(own)} tokens/s{how_sure}."
        n_prompt, n_gen = slow.n_prompt or fast.n_prompt, slow.n_gen or fast.n_gen
        lengths = ["-p", n_prompt, "-n", n_gen] if n_prompt and n_gen and n_gen < 10_000 else []
        return words, shell.lab("measure", *lengths)
    if cause.name == parts.DEPTH:
        return words, shell.lab("sweep", "--max-len", max(512, round(parts.position(slow) or 0)))
    if cause.name in (parts.STATE, parts.MACHINE) and not found.command:
        return words, shell.lab("doctor")
    return words, found.command or _command(cause.name, fast, slow)


def _command(name: str, fast: Setup, slow: Setup) -> str:
    """The measurement of the slower setup with one group of settings as in the faster one."""
    from lab.core.asked_settings import defaults
    from lab.features.why import parts
    from lab.runner import as_options, machine

    keys = {key for group, keys in parts.GROUPS.items() if group in name for key in keys}
    one = fast if name in ("quantization", parts.MODEL, "other settings") or not slow.records else slow
    if not one.records:
        return ""
    first = one.records[0]
    chosen = {key: value for key, value in as_options.asked(first.settings).items() if key not in ("lib", "rpc")}
    if not machine.accelerators(first.machine.devices):
        chosen.pop("n_gpu_layers", None)
    chosen |= {key: fast.settings[key] for key in keys & fast.settings.keys()}
    if chosen.get("threads") == chosen.get("threads_batch"):
        chosen.pop("threads_batch", None)
    chosen = {key: value for key, value in chosen.items() if value != defaults().get(key)}
    chosen["model"] = parts.spec_of(one)
    words = [word for key, value in chosen.items() for word in as_options.option(key, value)]
    return shell.lab("measure", *words)


def draw(found: Answer, figure: Figure) -> None:
    """A waterfall from the faster rate to the slower one on a logarithmic axis; whiskers are the known ranges."""
    from lab.show import canvas

    ax = figure.subplots()
    shown = [part for part in found.parts if part.log or part.half]
    rate = found.fast.tps
    ax.barh([0], [rate], color=canvas.COLOURS[0])
    for i, part in enumerate(shown, 1):
        after = rate / part.factor
        is_rest = part is found.rest
        colour = canvas.GUIDE if is_rest else canvas.COLOURS[1] if part.log > 0 else canvas.COLOURS[2]
        ax.barh([i], [abs(rate - after)], left=[min(rate, after)], color=colour, alpha=0.8)
        if part.half and part.range:
            ends = [rate / part.range[0], rate / part.range[1]]
            ax.plot(ends, [i, i], color=canvas.INK, lw=1.5, marker="|", ms=8)
        ax.text(1.01, i, f"{part.factor:.2f}x", transform=ax.get_yaxis_transform(), va="center", fontsize=9)
        rate = after
    ax.barh([len(shown) + 1], [found.slow.tps], color=canvas.COLOURS[0])
    names = [f"{found.letters[0]}: {digits(found.fast.tps)}", *(part.name for part in shown)]
    ax.set_yticks(range(len(shown) + 2), [*names, f"{found.letters[1]}: {digits(found.slow.tps)}"])
    ax.invert_yaxis()
    ax.set_xscale("log")
    lowest = min(found.slow.tps, rate)
    ax.set_xlim(lowest / 1.5, found.fast.tps * 1.3)
    ax.set_xlabel("tokens/s")
    canvas.finish([ax], f"Why {found.letters[1]} is {times(found.ratio)} as slow as {found.letters[0]}")


def document(found: Answer) -> dict[str, Any]:
    """The answer as JSON."""
    last, command = conclusion(found)
    names = ("tps", "counts", "source", "label", "n_prompt", "n_gen", "n_depth")
    figures = {
        letter: {**{name: getattr(one, name) for name in names}, "settings": dict(one.settings)}
        for letter, one in _in_order(found)
    }
    more = {"slower": found.letters[1], "ratio": found.ratio, "parts": [_as_dict(part) for part in found.parts]}
    causes = [part.name for part in found.causes]
    results = str(found.path) if found.path else None
    return {
        **figures,
        **more,
        "causes": causes,
        "sentence": last,
        "command": command or None,
        "notes": list(found.notes),
        "results": results,
    }


@click.command("why", cls=Command)
@click.argument("figures", nargs=-1, metavar="[A] [B]")
@with_options(
    click.option(
        "--budget",
        default=DEFAULT_BUDGET,
        show_default=True,
        help="Time to measure depth and settings; 0: measure nothing.",
    ),
    click.option("--model", "-m", help="Measure with this model if the results name none."),
    click.option("--prefill", is_flag=True, help="Compare prefill instead of decode."),
    out_option("Folder for the measurements and the plot."),
    NO_PLOT,
    as_json_option(),
)
def command(
    figures: tuple[str, ...], budget: str, model: str | None, prefill: bool, out: str, no_plot: bool, as_json: bool
) -> None:
    """Explain why two speeds differ, cause by cause.

    \b
      lab why results/mine.jsonl results/theirs.jsonl
      lab why results/mine.jsonl pasted.txt --budget 5min
      lab why "289 tokens/s" - --budget 0      # paste the other one, then Ctrl-D

    A and B are results files, texts that other programs printed (- for stdin), or figures such as "35 tokens/s". One
    file with two setups is enough. A file with one is compared with the best that this machine can do, by the ceilings
    of its folder (lab ceilings). Without arguments the newest results in --out are used. The command takes the ratio
    apart into factors: what the figures count, depth of the context, settings, model, machine, and what is not
    explained. It measures depth and settings on this machine, from A's setup to B's and back, in blocks with fresh
    engines, until --budget is spent. What three blocks, or at least one, of it would exceed is not measured. What is
    unknown stays in the part that is not explained.
    """
    from lab.features import known
    from lab.show import console
    from lab.show.section import print_sections

    if len(figures) > 2:
        raise LabError(f"{len(figures)} figures are too many.", "Compare two at a time.")
    if not figures:
        files = sorted(Path(out).glob("*.jsonl"), key=lambda path: path.name)
        if not files:
            raise LabError(f"There are no results in {out}.", 'Give two figures: lab why A.jsonl "35 tokens/s"')
        figures = tuple(map(str, files[-2:]))
    if figures.count("-") > 1:
        raise LabError("Only one of the two can come from stdin.", "Save the other one to a file.")
    err = console.console(stderr=True)
    with console.progress(err, None, str, in_blocks=True) as (watch, _):
        a, b = figures[0], figures[1] if len(figures) > 1 else None
        found = why(a, b, budget=budget, model=model, prefill=prefill, out=out, watch=watch)
    made = sections(found)
    plots = [] if no_plot else known.draw(made, Path(out), found.path.stem if found.path else "why")
    if as_json:
        console.print_json({**document(found), "plots": [str(plot) for plot in plots]})
        return
    stdout = console.console()
    print_sections(made, stdout)
    for plot in plots:
        stdout.print(f"plot     {plot}")
