"""`lab turns --url`: the same conversation through a server, a request per turn, with its real answers.

A server shows no steps. How much of a prompt its cache served is in its own figures (`cached_tokens`,
`timings.cache_n`). Without them the lab estimates it from the TTFT and marks it with ~: the first turn has nothing
cached, so its TTFT gives the time per token. The same time per token gives the times without a cache and with one that
nothing breaks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core import results
from lab.core.levers import Turns
from lab.core.lists import grouped, plural
from lab.core.record import OK
from lab.core.request import CHAT, RequestRecord, Turn, short_name
from lab.core.request_times import figures as request_figures
from lab.features.common import cell
from lab.features.serve import formats, text_requests
from lab.features.serve.prompts import Prompt
from lab.features.serve.send_plan import Ask, fresh_nonce
from lab.features.serve.servers import Server
from lab.features.turns import conversation
from lab.runner import as_options
from lab.runner.progress import ShowStatus, Status
from lab.show import canvas
from lab.show.kind import Context, Kind
from lab.show.section import WIDE, Picture, Section, tabled
from lab.show.wording import seconds

if TYPE_CHECKING:
    import click
    import pandas as pd
    from matplotlib.figure import Figure

TOKENS_PER_WORD = 1.3
"""Of a server that cannot count tokens."""

ROLES = ("system", "user", "assistant")


def execute(lever: Turns, server: Server, text: str, path: Path, watch: ShowStatus) -> Iterator[RequestRecord]:
    """Send a request per turn, append each to `path`, and yield its record. A failed request ends the conversation.

    Messages are whole words, so their lengths in tokens are approximate. The first words differ in each session, so
    that the first turn finds no cache.
    """
    words = re.findall(r"\S+\s+", text + " ")
    sample = "".join(words[:300])
    n_counted = server.counter.count(sample) if server.counter else None
    ratio = n_counted / len(words[:300]) if n_counted else TOKENS_PER_WORD

    def in_words(n: int) -> int:
        return max(2, round(n / ratio))

    own = dataclasses.replace(
        lever,
        system=in_words(lever.system) if lever.system else 0,
        messages=tuple(map(in_words, lever.messages)),
        answers=tuple(map(in_words, lever.answers)),
    )
    nonce = [f"{letter} " for letter in fresh_nonce(random.Random()).split()]

    def source(sequence: int, n: int) -> list[str]:
        return [*nonce, *(words * (1 + n // len(words)))][:n]

    turns = conversation.turns_of(own, source)
    prompt, n_common, _, parts = next(turns)
    for number, n_gen in enumerate(lever.answers, 1):
        watch(Status(f"turn {number} of {len(lever.answers)}"))
        n_before = sum(map(len, prompt[:n_common]))
        place = Turn(number=number, differs_at=n_before if number > 1 else None, of=lever)
        ask = ask_for(server, parts, n_gen, place)
        reply = server.send(ask)
        record = server.record(path.stem, reply.request)
        results.save(path, record)
        yield record
        if reply.request.status != OK:
            return
        answer = re.findall(r"\s+|\S+\s*", reply.text)
        if number < len(lever.answers):
            prompt, n_common, _, parts = turns.send(answer or [" "])


def ask_for(server: Server, parts: Sequence[Sequence[str]], n_gen: int, place: Turn) -> Ask:
    """The request of a turn: the system prompt, and messages and answers in turn. It may be cached."""
    system, *said = ("".join(part) for part in parts)
    chat = [*([("system", system)] if system else []), *((ROLES[1 + i % 2], one) for i, one in enumerate(said))]
    whole = "\n".join([system, *said]) if server.endpoint.api != CHAT else "".join([system, *said])
    asked = server.asked(Prompt(whole, 0, "", ""), 0, n_gen, turn=place)
    asked = dataclasses.replace(asked, n_prompt=None, n_prompt_counted=None, counted_by=None)
    options = tuple(one for one in server.endpoint.accepted if one != formats.NO_CACHE)
    body: dict[str, Any] = formats.body(server.endpoint.api, server.own_name, whole, asked, options)
    if server.endpoint.api == CHAT:
        body["messages"] = [{"role": role, "content": content} for role, content in chat]
    return Ask(asked=asked, body=json.dumps(body))


def figures(records: Sequence[RequestRecord]) -> pd.DataFrame:
    """A row per turn of one conversation. `is_known`: the server reported its cached tokens."""
    import pandas as pd

    rows = []
    for record in records:
        one, turn = record.request, record.request.asked.turn
        own = request_figures(one)
        ttft, e2e = own.ttft_ns, own.e2e_ns
        if turn is None or one.status != OK or ttft is None or e2e is None:
            continue
        timings, usage = one.timings, one.usage
        counted = [usage.cached_tokens if usage else None, timings.n_cached if timings else None]
        n_cached = next((n for n in counted if n is not None), math.nan)
        n_prompt: float = math.nan
        if usage and usage.prompt_tokens is not None:
            n_prompt = usage.prompt_tokens
        elif timings and timings.n_prompt is not None and timings.n_cached is not None:
            n_prompt = timings.n_prompt + timings.n_cached
        n_gen = own.n_generated
        kinds = conversation.parse_breaks(turn.of.breaks, len(turn.of.messages))
        values = {"n_prompt": n_prompt, "n_cached": n_cached, "n_gen": n_gen or math.nan}
        spans = {"ttft_s": ttft / 1e9, "decode_s": (e2e - ttft) / 1e9, "turn_s": e2e / 1e9}
        breaks, n_message = ", ".join(kinds[turn.number - 1]), turn.of.messages[turn.number - 1]
        at = {"turn": turn.number, "breaks": breaks, "differs_at": turn.differs_at, "n_message": n_message}
        rows.append({**at, **values, **spans})
    if not rows:
        return pd.DataFrame()
    t = pd.DataFrame(rows).sort_values("turn", ignore_index=True)
    t["is_known"] = t.n_cached.notna()
    per_token_s = t.ttft_s[0] / (t.n_prompt[0] - (t.n_cached[0] if t.is_known[0] else 0))
    estimate = (t.n_prompt - t.ttft_s / per_token_s).round().clip(lower=0)
    t["n_cached"] = t.n_cached.fillna(estimate)
    t["n_computed"] = t.n_prompt - t.n_cached
    grown = t.n_prompt - t.n_prompt.shift(fill_value=0) - t.n_gen.shift(fill_value=0)
    n_new = grown.where(t.breaks.eq("") & (grown > 0), t.n_message)
    t["n_again"] = (t.n_computed - n_new).clip(lower=0)
    t["sum_s"] = t.turn_s.cumsum()
    t["without_s"] = t.n_prompt * per_token_s + t.decode_s
    t["perfect_s"] = (n_new * per_token_s + t.decode_s).clip(upper=t.turn_s)
    return t


def sentences(t: pd.DataFrame) -> list[str]:
    """The answer, what was read again, and on what the figures rest."""
    again = (t.ttft_s * t.n_again / t.n_computed).sum()
    words = [
        f"{plural(len(t), 'turn')} take {seconds(t.turn_s.sum())}; {seconds(t.ttft_s.sum())} of it is waiting for the "
        f"first token, {seconds(again)} of that for tokens read before."
    ]
    for row in t[t.breaks.ne("")].to_dict("records"):
        words.append(
            f"Turn {row['turn']} ({row['breaks']}): the text differs after {row['differs_at']:,.0f} letters, and "
            f"{'' if row['is_known'] else 'about '}{row['n_again']:,.0f} tokens were read again. "
            f"{conversation.BREAKS.get(row['breaks'], 'A prompt that does not change')} would save about "
            f"{seconds(row['turn_s'] - row['perfect_s'])}."
        )
    if not t.is_known.all():
        words.append("~: the server does not report cached tokens; they are estimated from the TTFT.")
    return [*words, "Times without a cache and with a perfect one are estimated from the first turn's time per token."]


COLUMNS = (
    ("turn", lambda row: f"{row['turn']}"),
    ("broken by", lambda row: row["breaks"] or "-"),
    ("prompt\ntokens", lambda row: count(row["n_prompt"])),
    ("cached", lambda row: count(row["n_cached"], "" if row["is_known"] else "~")),
    ("computed", lambda row: count(row["n_computed"], "" if row["is_known"] else "~")),
    ("again", lambda row: count(row["n_again"], "" if row["is_known"] else "~")),
    ("TTFT\ns", lambda row: cell(row["ttft_s"])),
    ("decode\ns", lambda row: cell(row["decode_s"])),
    ("turn\ns", lambda row: cell(row["turn_s"])),
    ("sum\ns", lambda row: cell(row["sum_s"])),
    ("no cache\ns", lambda row: cell(known(row["without_s"]))),
    ("perfect\ns", lambda row: cell(known(row["perfect_s"]))),
)


def known(value: float) -> float | None:
    return None if math.isnan(value) else value


def count(value: float, mark: str = "") -> str:
    return "-" if math.isnan(value) else f"{mark}{value:,.0f}"


def draw(t: pd.DataFrame, title: str, figure: Figure) -> None:
    """Above the tokens of each prompt, below the time of each turn."""
    figure.set_figheight(figure.get_figheight() * 1.4)
    tokens, spans = figure.subplots(2, 1, sharex=True)
    colours, again_s = [style["color"] for style in canvas.styles(4)], t.ttft_s * t.n_again / t.n_computed
    new = t.n_computed - t.n_again
    conversation.stack(tokens, t.turn, {"cached": t.n_cached, "read again": t.n_again, "new": new}, colours)
    parts = {"": 0 * again_s, "TTFT, tokens read before": again_s, "TTFT, new tokens": t.ttft_s - again_s}
    conversation.stack(spans, t.turn, {**parts, "decode": t.decode_s}, colours)
    spans.plot(t.turn, t.perfect_s, color=canvas.GUIDE, lw=1.4, label="perfect cache, estimated")
    spans.plot(t.turn, t.without_s, color=canvas.GUIDE, ls="--", lw=1.4, label="no cache, estimated")
    tokens.set_ylabel("tokens of the prompt")
    spans.set(xlabel="turn", ylabel="time of the turn (s)")
    spans.xaxis.get_major_locator().set_params(integer=True)
    canvas.finish([tokens, spans], f"A conversation through a server\n{title}", is_apart=True)


def sections(records: Sequence[RequestRecord]) -> list[Section]:
    """A section for each session."""
    made = []
    for own in grouped(records, lambda one: one.session).values():
        t = figures(own)
        if t.empty:
            continue
        title = f"{short_name(own[0].model)} through {own[0].endpoint.server or 'its server'}"
        lines: list[dict[str, Any]] = [{str(key): value for key, value in row.items()} for row in t.to_dict("records")]
        nothing = {True: None}
        document = [{key: nothing.get(value != value, value) for key, value in row.items()} for row in lines]
        made.append(
            Section(
                title,
                "a conversation turn by turn; again: tokens of earlier turns that were computed again",
                name="turns",
                question="How much of a conversation's prompt is read again?",
                **tabled(COLUMNS, lines),
                sentences=sentences(t),
                pictures=[
                    Picture("turns", "Tokens of each prompt, and the time of each turn.", partial(draw, t, title), WIDE)
                ],
                data=partial(dict, rows=[{"experiment": "turns", "setup": title, **row} for row in document]),
            )
        )
    return made


def is_mine(record: object) -> bool:
    return isinstance(record, RequestRecord) and record.request.asked.turn is not None


def again(records: Sequence[RequestRecord]) -> str:
    """The command that makes these requests again."""
    first = next(one.request.asked.turn.of for one in records if one.request.asked.turn)
    own = {name: value for name, value in conversation.options_of(first).items() if name != "keep"}
    return as_options.line("turns", text_requests.server_options(records[0]) | own)


def chapters(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Conversations through a server, a part for each session."""
    parts, title = sections(records), "Conversations through a server"
    return [Section(title, name="turns", question=parts[0].question, parts=parts)] if parts else []


KINDS = (Kind("served turns", is_mine, chapters, again),)


def converse(context: click.Context, url: str, asked: dict[str, Any]) -> None:
    """`lab turns` through a server."""
    from lab.features.running import Output, collect
    from lab.features.serve.command import confirm, given
    from lab.features.serve.servers import connect, prompt_text, reaching_of
    from lab.show import console

    lever = conversation.lever_of(*(asked[name] for name in ("system", "turn", "turns", "breaks", "seed")))
    confirm(url, f"{len(lever.messages)} requests", asked["yes"])
    output, err = Output.taken_from(asked), console.console(stderr=True)
    err.print("examining the server ...")
    model = asked["model"] if "model" in given(context) else None
    with connect(url, model, err.print, **reaching_of(asked)) as server:
        if asked["dry_run"]:
            n_most = lever.system + sum(lever.messages) + sum(lever.answers)
            err.print(f"{len(lever.messages)} turns, up to about {n_most:,} tokens in the last")
            return
        path, text = server.new_file(output.folder), prompt_text(asked["prompt"])
        records, problem = collect(
            lambda watch: execute(lever, server, text, path, watch), path, err, None, text_requests.finished
        )
        output.end(records, path, problem, any(one.request.status != "ok" for one in records))
