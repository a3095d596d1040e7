"""`lab turns --url`: the same conversation through a server, a request per turn, with its real answers.

A server shows no steps. How much of a prompt its cache served is in its own figures (`cached_tokens`,
`timings.cache_n`). After the conversation the prompts of two turns are sent again with other first words, so that
nothing is cached. With the first turn they give the law of the TTFT of n new tokens after c cached ones,

    T = f + a (n - c) + b (n^2 - c^2),

whose last term is attention. It gives the times without a cache and with one that nothing breaks and, where the server
does not report cached tokens, c from the TTFT, marked with ~.
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

from lab.core import results, stats
from lab.core.lists import first_known, grouped
from lab.core.payloads import Turns
from lab.core.record import OK
from lab.core.request import CHAT, RequestRecord, Turn, short_name
from lab.core.request_times import figures as request_figures
from lab.features.serve import formats, load_figures, through_server
from lab.features.serve.formats import Ask, fresh_nonce
from lab.features.serve.servers import Prompt, Server
from lab.features.turns import conversation
from lab.runner import as_options
from lab.runner.progress import ShowStatus, Status
from lab.show.section import WIDE, Context, Kind, Picture, Section, tabled

if TYPE_CHECKING:
    import click
    import pandas as pd

TOKENS_PER_WORD = 1.3
"""Of a server that cannot count tokens."""


def execute(
    lever: Turns, server: Server, text: str, path: Path, watch: ShowStatus, said: Sequence[str] = ()
) -> Iterator[RequestRecord]:
    """Send a request per turn, append each to `path`, and yield its record. A failed request ends the conversation.

    Messages are whole words of `text`, so their lengths in tokens are approximate; or those that were `said` in a file.
    The first words differ in each session, so that the first turn finds no cache. A second conversation, which breaks
    the cache, is sent and not recorded.
    """
    words, last = [re.findall(r"\s*\S+\s*", part) for part in said or [text]], len(lever.answers)
    if said:
        lengths = [len(own) for own in words]
    else:
        n_counted = server.counter.count("".join(words[0][:300])) if server.counter else None
        ratio = n_counted / len(words[0][:300]) if n_counted else TOKENS_PER_WORD
        pairs = [n for pair in zip(lever.messages, lever.answers, strict=True) for n in pair]
        lengths = [max(2, round(n / ratio)) if n else 0 for n in (lever.system, *pairs)]
    nonces = [[f"{letter} " for letter in fresh_nonce(random.Random()).split()] for _ in range(3)]
    begin, flat = 0 if lengths[0] else 1, [word for own in words for word in own]
    lengths[begin] += len(nonces[0])
    in_words = [max(1, n) for n in lengths[1:]]
    own = dataclasses.replace(lever, system=lengths[0], messages=tuple(in_words[::2]), answers=tuple(in_words[1::2]))

    def send(parts: Sequence[Sequence[str]], n_gen: int, place: Turn) -> tuple[RequestRecord, str]:
        reply = server.send(ask_for(server, parts, n_gen, place))
        record = server.record(path.stem, reply.request)
        results.save(path, record)
        return record, reply.text

    turns, cold = conversation.turns_of(own, lambda n: [*nonces[0], *(flat * (1 + n // len(flat)))][:n]), []
    prompt, n_common, _, parts = next(turns)
    for number, n_gen in enumerate(lever.answers, 1):
        watch(Status(f"turn {number} of {last}"))
        differs_at = sum(map(len, prompt[:n_common])) if number > 1 else None
        place = Turn(number=number, differs_at=differs_at, of=lever)
        if conversation.SECOND in conversation.parse_breaks(lever.breaks, last)[number - 1]:
            server.send(ask_for(server, [parts[0], flat[::-1][: len(parts[1])]], 2, place))
        record, answer = send(parts, n_gen, place)
        yield record
        if record.request.status != OK:
            return
        if number in (last // 2 + 1, last) and number > 1:
            cold.append((parts, dataclasses.replace(place, is_cold=True, differs_at=None)))
        if number < last:
            prompt, n_common, _, parts = turns.send(re.findall(r"\s+|\S+\s*", answer) or [" "])
    for nonce, (parts, place) in zip(nonces[1:], cold, strict=False):
        watch(Status(f"turn {place.number} without a cache"))
        changed = [*nonce, *parts[begin][len(nonce) :]]
        yield send([*parts[:begin], changed, *parts[begin + 1 :]], 2, place)[0]


def ask_for(server: Server, parts: Sequence[Sequence[str]], n_gen: int, place: Turn) -> Ask:
    """The request of a turn: the system prompt, and messages and answers in turn. It may be cached."""
    said, is_chat = ["".join(part) for part in parts], server.endpoint.api == CHAT
    whole = ("" if is_chat else "\n").join(said)
    asked = server.asked(Prompt(whole, 0, "", ""), 0, n_gen, turn=place)
    asked = dataclasses.replace(asked, n_prompt=None, n_prompt_counted=None, counted_by=None)
    options = tuple(one for one in server.endpoint.accepted if one != formats.NO_CACHE)
    body: dict[str, Any] = formats.body(server.endpoint.api, server.own_name, whole, asked, options)
    if is_chat:
        roles = ("system", *("user", "assistant") * len(said))
        chat = [{"role": role, "content": one} for role, one in zip(roles, said, strict=False)]
        body["messages"] = chat if said[0] else chat[1:]
    return Ask(asked=asked, body=json.dumps(body))


def figures(records: Sequence[RequestRecord]) -> pd.DataFrame:
    """A row per turn of one conversation; empty if no turn succeeded."""
    import pandas as pd

    rows = []
    for one in (record.request for record in records):
        turn, times, timings, usage = one.asked.turn, request_figures(one), one.timings, one.usage
        if turn is None or one.status != OK or times.ttft_ns is None or times.e2e_ns is None:
            continue
        n_cached = first_known((usage and usage.cached_tokens, timings and timings.n_cached))
        n_prompt = usage and usage.prompt_tokens
        if n_prompt is None and timings and timings.n_prompt is not None and timings.n_cached is not None:
            n_prompt = timings.n_prompt + timings.n_cached
        kinds = conversation.parse_breaks(turn.of.breaks, len(turn.of.messages))[turn.number - 1]
        known = {"turn": turn.number, "is_cold": turn.is_cold, "breaks": ", ".join(kinds)}
        known |= {"differs_at": turn.differs_at, "n_message": turn.of.messages[turn.number - 1]}
        known |= {"n_prompt": n_prompt, "n_cached": n_cached, "n_gen": times.n_generated or None}
        rows.append({**known, "ttft_s": times.ttft_ns / 1e9, "decode_s": (times.e2e_ns - times.ttft_ns) / 1e9})
    if all(row["is_cold"] for row in rows):
        return pd.DataFrame()
    every = pd.DataFrame(rows).astype(dict.fromkeys(("n_prompt", "n_cached", "n_gen", "differs_at"), float))
    t = every[~every.is_cold].sort_values("turn", ignore_index=True)
    points = pd.concat([t.iloc[:1], every[every.is_cold]])
    points = points.assign(n=points.n_prompt - points.n_cached.fillna(0)).dropna(subset=["n"])
    fixed = linear = square = math.nan
    if len(points):
        columns = [list(points.n), [n * n for n in points.n], [1.0] * len(points)][: len(points)]
        linear, square, fixed = (*stats.fit(columns, list(points.ttft_s)), 0.0, 0.0)[:3]

    def time_of(n: pd.Series[float]) -> pd.Series[float]:
        return linear * n + square * n**2

    t["is_known"] = t.n_cached.notna()
    left = (fixed + time_of(t.n_prompt) - t.ttft_s).clip(lower=0)  # the time that the cached tokens would have taken
    root = (linear**2 + 4 * square * left) ** 0.5
    estimate = (root - linear) / (2 * square) if square > 0 else left / linear
    t["n_cached"] = t.n_cached.fillna(estimate.round().clip(upper=t.n_prompt))
    t["n_computed"] = t.n_prompt - t.n_cached
    grown = t.n_prompt - (t.n_prompt + t.n_gen - 1).shift(fill_value=0)  # the last token of an answer is not cached
    n_new = grown.where(t.breaks.eq("") & (grown > 0), t.n_message)
    t["n_again"] = (t.n_computed - n_new).clip(lower=0).round()
    t["turn_s"] = t.ttft_s + t.decode_s
    t["sum_s"] = t.turn_s.cumsum()
    t["without_s"] = fixed + time_of(t.n_prompt) + t.decode_s
    perfect = fixed + time_of(t.n_prompt) - time_of(t.n_prompt - n_new) + t.decode_s
    t["perfect_s"] = perfect.clip(upper=t.turn_s)
    unknown = dict.fromkeys(("expected_ttft_s", "expected_turn_s", "save_s", "load_s", "state_bytes"), math.nan)
    return t.assign(conversation=1, keep=conversation.SERVER, cache="", n_runs=1, **unknown)


def sections(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Conversations through a server, a part for each session."""
    parts, table = list[Section](), conversation.TABLE
    law = "Times without a cache and with a perfect one come from a formula for the TTFT, fitted to uncached turns."
    for own in grouped(records, lambda one: one.session).values():
        if (t := figures(own)).empty:
            continue
        rows, title = (
            conversation.finished(t),
            f"{short_name(own[0].model)} through {own[0].endpoint.server or 'its server'}",
        )
        words = [*conversation.sentences(rows), law]
        data = [{"experiment": "turns", "setup": title, **row._asdict()} for row in rows]
        parts.append(
            Section(
                title,
                table.title.replace(", medians over runs", "").replace("token that", "letter that"),
                name="turns",
                question=table.question,
                answer="" if context.is_page else words[0],
                **tabled(table.columns, rows),
                sentences=words if context.is_page else words[1:],
                pictures=[Picture("turns", table.caption, partial(conversation.draw, rows, title), WIDE)],
                data=partial(dict, rows=data),
            )
        )
    title = "Conversations through a server"
    return [Section(title, name="turns", question=table.question, parts=parts)] if parts else []


def again(records: Sequence[RequestRecord]) -> str:
    """The command that makes these requests again."""
    first = next(one.request.asked.turn.of for one in records if one.request.asked.turn)
    return as_options.line("turns", load_figures.server_options(records[0]) | conversation.options_of(first))


KINDS = (
    Kind("served turns", lambda one: isinstance(one, RequestRecord) and bool(one.request.asked.turn), sections, again),
)


def converse(context: click.Context, url: str, asked: dict[str, Any]) -> None:
    """`lab turns` through a server."""
    from lab.features.running import Output, collect
    from lab.features.serve.command import confirm, given
    from lab.features.serve.servers import connect, prompt_text, reaching_of
    from lab.show import console

    said = conversation.read_messages(Path(asked["replay"])) if asked["replay"] else []
    if said:  # lengths in tokens are those of its words
        name, count = Path(asked["replay"]).name, lambda part: round(TOKENS_PER_WORD * len(part.split()))
        lever = conversation.replayed(said, name, asked["breaks"], count)
    else:
        lever = conversation.lever_of(*(asked[name] for name in ("system", "turn", "turns", "breaks", "seed")))
    confirm(url, f"{len(lever.messages) + 2} requests", asked["yes"])
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
            lambda watch: execute(lever, server, text, path, watch, said), path, err, None, through_server.finished
        )
        output.end(records, path, problem, any(one.request.status != "ok" for one in records))
