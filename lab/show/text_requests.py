"""Requests to servers as text: tables of medians, what they show, what cannot be known of them, and failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lab.analysis import request_table, table, wording
from lab.core import levers, stats
from lab.core.record import OK
from lab.core.request import RequestRecord
from lab.core.request_figures import Figures, figures
from lab.runner.plan import join
from lab.show import request_words
from lab.show.console import Grid, grid_of

if TYPE_CHECKING:
    import pandas as pd

SHOWN = {
    "ttft_s": "TTFT\ns",
    "first_output_s": "first\noutput s",
    "tpot_ms": "TPOT\nms",
    "decode_tps": "decode\ntokens/s",
    "stall_ms": "longest\nstall ms",
    "e2e_s": "E2E\ns",
}
"""Figures of the summary, and their headings."""

OWN_CAPTION = "What the server says of its own times, medians"
OWN_TIMES = ("server_prompt_s", "server_decode_s")
OWN_HEADINGS = ("prompt\ns", "decode\ns", "TTFT less prompt\nms")
"""The server's own times, and what of TTFT they leave."""

MEANINGS = (
    "TTFT: from the sending of the request to the first event with a token, so tokenising, queueing and the network "
    "are in it; prefill alone is not visible. TPOT: time of each further token. E2E: to the last one."
)


def finished(record: RequestRecord) -> str:
    """A line on a request that has ended."""
    one = figures(record.request)
    if one.status != OK:
        what = one.failure or one.status
    elif one.came_at_once and one.e2e_ns is not None:
        what = f"E2E {wording.digits(one.e2e_ns / 1e9)} s; the answer arrived at once, so TTFT is not known"
    elif one.ttft_ns is None:
        what = "no token came"
    else:
        what = f"TTFT {wording.digits(one.ttft_ns / 1e9)} s"
        if one.tpot_ns is not None:
            what += f", TPOT {wording.digits(one.tpot_ns / 1e6)} ms"
        elif one.tpot_bounds_ns is not None:
            what += f", TPOT {' to '.join(wording.digits(ns / 1e6) for ns in one.tpot_bounds_ns)} ms"
        marks = [word for word, is_so in (("warm", one.is_warm), ("short", one.is_short)) if is_so]
        what += f" ({', '.join(marks)})" if marks else ""
    return f"{_name(one)}, repeat {one.asked.repeat + 1}: {what}"


def summary(records: Sequence[RequestRecord]) -> pd.DataFrame:
    """The rows of `lab.summary` of requests that ran alone."""
    return table.summary(table.runs(request_table.alone(records)))


def as_rows(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """The rows of the summary as dictionaries."""
    rows: list[dict[str, Any]] = summary(records).to_dict("records")
    return rows


def print_requests(records: Sequence[RequestRecord], out: Console) -> None:
    """Prints tables of requests that ran alone, what they show in words, what is not known of them, and failures."""
    rows = summary(records)
    for label, setup in table.setups(rows) if len(rows) else []:
        for _, part in setup.groupby("n_gen"):
            out.print()
            out.print(Text(label, style="bold") + Text(f": {heading(part)}"))
            out.print(_grid(part))
            out.print(Text(MEANINGS, style="dim"))
            if of_server := own_times(part):
                out.print(f"\n{OWN_CAPTION}")
                grid = grid_of("prompt\ntokens", *OWN_HEADINGS)
                for cells in of_server:
                    grid.add_row(*cells)
                out.print(grid)
            for sentence in findings(part):
                out.print(sentence)
    if not any(map(request_table.went_well, request_table.alone(records))):
        out.print("\nNo request went well.")
    for sentence in warnings(records):
        out.print(Text("! ", style="yellow") + Text(sentence))
    for line in failures(records):
        out.print(Text("failed ", style="red") + Text(line))


def heading(rows: pd.DataFrame) -> str:
    """The heading of a summary of one setup and one n_gen."""
    n = int(rows.n_gen.iloc[0])
    few = sorted(set(rows.repeats[rows.repeats < stats.fewest_for_interval()]))
    if not few:
        below = "95 % interval below it"
    elif few == [1]:
        below = "one request: too few to tell how sure"
    else:
        below = (
            f"range below it ({join(few)} requests are too few for an interval, {stats.fewest_for_interval()} would do)"
        )
    return f"{n:,} token{'s' * (n != 1)} asked for in each request; median, {below}"


def request_cells(rows: pd.DataFrame) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """The headings of a summary of requests, and the cells of its rows: (median, interval, or range).

    The first ones are the tokens of the answer, the last one is a note where there is any.
    """
    has_bounds = ("tpot_ms", "decode_tps") if (rows.n_bounds > 0).any() else ()
    shown = [name for name in SHOWN if name in has_bounds or rows[name].notna().any()]
    if "first_output_s" in shown and not _has_reasoning(rows):
        shown.remove("first_output_s")
    notes = [_note(row) for row in rows.to_dict("records")]
    lines = []
    for row, note in zip(rows.to_dict("records"), notes, strict=True):
        cells = [_cell(row, "n_answer", lambda n: f"{n:,.0f}"), *(_figure(row, name) for name in shown)]
        lines.append([*cells, *([(note, "")] if any(notes) else [])])
    return ["answer\ntokens", *(SHOWN[name] for name in shown), *(["note"] if any(notes) else [])], lines


def own_times(rows: pd.DataFrame) -> list[list[str]]:
    """The rows of a table of the server's own times: the length, then what OWN_HEADINGS say. Empty without any."""
    known = rows[rows[list(OWN_TIMES)].notna().any(axis=1)].to_dict("records")
    return [
        [
            length(row["n_prompt"]),
            *(wording.digits(row[name]) for name in OWN_TIMES),
            wording.digits(1e3 * (row["ttft_s"] - row["server_prompt_s"])),
        ]
        for row in known
    ]


def findings(rows: pd.DataFrame) -> list[str]:
    """Sentences on a summary of one setup and one n_gen: TTFT over the length, and its share of the whole."""
    rows = rows[~((rows.warm == True) | (rows.short == True)) & (rows.ttft_s > 0)]  # noqa: E712
    rows = rows[rows.n_prompt > 0].sort_values("n_prompt")
    if rows.empty:
        return []
    sentences = []
    short, long = rows.iloc[0], rows.iloc[-1]
    if long.n_prompt > short.n_prompt:
        ratio = long.ttft_s / short.ttft_s
        times_word = "as long as" if 0.95 < ratio < 1.05 else f"{ratio:.3g}x"
        sentences.append(
            f"TTFT of a prompt of {long.n_prompt:,} tokens was {times_word} that of {short.n_prompt:,}, "
            f"for {long.n_prompt / short.n_prompt:.3g}x the tokens."
        )
    if long.e2e_s > 0:
        shares = [
            f"{100 * row.ttft_s / row.e2e_s:.0f} % at {row.n_prompt:,}"
            for row in (short, long)[: len(rows)]
            if row.e2e_s
        ]
        sentences.append(f"Of the whole time TTFT was {' and '.join(dict.fromkeys(shares))} prompt tokens.")
    return sentences


def failures(records: Sequence[RequestRecord]) -> list[str]:
    """One line per class of failure, with how many there were and the first of them; warm-ups are counted apart."""
    own = request_table.alone(records)
    by_class: dict[tuple[bool, str], list[RequestRecord]] = {}
    for record in own:
        if record.request.status != OK:
            key = record.request.asked.warmup, record.request.failure or record.request.status
            by_class.setdefault(key, []).append(record)
    lines = []
    for (is_warmup, name), failed in by_class.items():
        first = failed[0].request
        n = sum(record.request.asked.warmup == is_warmup for record in own)
        kind = f"{'warm-up ' * is_warmup}request{'s' * (n != 1)}"
        example = f"{_name(figures(first))}, repeat {first.asked.repeat + 1}: {first.error}"
        lines.append(f"{len(failed)} of {n} {kind}, {name}; such as {example}")
    return lines


def _grid(rows: pd.DataFrame) -> Grid:
    """One row per prompt length: medians, and below them their intervals (or ranges, where requests are few)."""
    headings, lines = request_cells(rows)
    grid = grid_of("prompt\ntokens", "n", *headings)
    for row, line in zip(rows.to_dict("records"), lines, strict=True):
        cells = [Text(middle) + Text(f"\n{ends}" if ends else "", style="dim") for middle, ends in line]
        grid.add_row(length(row["n_prompt"]), f"{row['repeats']}", *cells)
    return grid


def length(n_prompt: float | None) -> str:
    """A length of a prompt; "?" where nobody counted it."""
    return "?" if n_prompt is None or n_prompt != n_prompt else f"{n_prompt:,.0f}"


def _name(one: Figures) -> str:
    n = request_table.n_prompt(one)
    name = "a prompt of unknown length" if n is None else levers.name_of(n, None)
    return name + (f", {one.asked.load.words}" if one.asked.load else "")


def _figure(row: dict[str, Any], name: str) -> tuple[str, str]:
    """The cell of a figure; of TPOT and the rate from it "a to b" where a request of the row has only bounds."""
    if name in ("tpot_ms", "decode_tps") and row["n_bounds"]:
        ends = [row["tpot_low_ms"], row["tpot_high_ms"]]
        if name == "decode_tps":
            ends = [1e3 / ms if ms > 0 else float("nan") for ms in reversed(ends)]
        return " to ".join(map(wording.digits, ends)), ""
    return _cell(row, name, wording.digits)


def _cell(row: dict[str, Any], name: str, words: Callable[[float], str]) -> tuple[str, str]:
    ends = ("low", "high") if row[f"{name}_low"] == row[f"{name}_low"] else ("min", "max")
    low, middle, high = (row[key] for key in (f"{name}_{ends[0]}", name, f"{name}_{ends[1]}"))
    if middle != middle:
        return "-", ""
    has_ends = row["repeats"] > 1 and not (name == "n_answer" and low == high)
    return words(middle), f"{words(low)}-{words(high)}" if has_ends else ""


def _has_reasoning(rows: pd.DataFrame) -> bool:
    known = rows.first_output_s.notna()
    return bool((rows.first_output_s[known] != rows.ttft_s[known]).any() or not known.all())


def _note(row: dict[str, Any]) -> str:
    marks = (("warm", row["warm"]), ("short", row["short"]))
    return ", ".join(word for word, is_so in marks if is_so is True)


def warnings(records: Sequence[RequestRecord]) -> list[str]:
    """Sentences on requests that ran alone: which are set apart and why, what is not known, and what is near the error
    of the client itself. With several setups each begins with its label.
    """
    own = [record for record in request_table.alone(records) if request_table.went_well(record)]
    if not own:
        return []
    setups = table.setups(table.runs(own))
    sentences = []
    for label, rows in setups:
        chosen = [own[index] for index in rows.run]
        prefix = f"{label}: " if len(setups) > 1 else ""
        sentences += [prefix + sentence for sentence in request_words.doubts(chosen)]
    return sentences
