"""A recorded session once more, without what its client did to the cache: predicted times beside
measured ones.

    session = read_session(Path("results/...-record.jsonl"))
    bodies = mended(session)

The file has the requests' prompts (--keep-text). A request without the cause goes on from the one
before it as that was sent, with only its own new messages. The answers have as many tokens as the
recorded ones.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.core import results
from lab.errors import LabError
from lab.features.recording import figures
from lab.features.recording.differences import difference
from lab.features.recording.lines import CLIENT, RecordedCall
from lab.features.recording.prompts import MESSAGE, blocks_of
from lab.remote.access import Access, all_headers
from lab.remote.chat_bodies import is_of_messages_api, is_of_responses_api
from lab.remote.formats import as_list, fresh_nonce
from lab.show.cells import Column
from lab.show.section import Columns, Section, tabled
from lab.show.wording import digits, seconds

LLAMA_SERVER = "llama-server"
MOST_WAIT_S = 60.0
LOOK_S = 0.01
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
Body = dict[str, Any]


def read_session(path: Path) -> list[RecordedCall]:
    """The good calls of a recording, with their bodies. LabError for a file without them."""
    calls = [line for line in results.read([path]).findings if isinstance(line, RecordedCall)]
    calls = [call for call in calls if call.is_good]
    if not calls or not all(isinstance(call.body, dict) for call in calls):
        raise LabError(
            f"{path.name} has no requests to repeat.",
            "Record the session again with --keep-text.",
        )
    if len({call.session for call in calls}) > 1:
        raise LabError(f"{path.name} has several recordings.", "Give a file with one.")
    return calls


def mended(calls: Sequence[RecordedCall]) -> list[Body]:
    """The bodies of a session without what its client changed."""
    sent: dict[int, Body] = {}
    nonce = fresh_nonce()
    for call in calls:
        body = call.body
        before = None if call.follows is None else sent.get(call.follows)
        if before is not None:
            earlier = next(other.body for other in calls if other.call == call.follows)
            body = going_on(before, earlier, body)
        else:
            body = with_nonce(body, nonce)
        sent[call.call] = body
    return [ready_to_send(call, sent[call.call]) for call in calls]


def going_on(before: Body, earlier: Body, body: Body) -> Body:
    """A body that goes on from `before`, which stands for `earlier`, with its new messages."""
    name = "input" if is_of_responses_api(body) else "messages"
    items = as_list(body.get(name))
    if not items:
        return {**body, "prompt": before.get("prompt")} if "prompt" in body else body
    blocks = blocks_of(body)
    differs = difference(blocks_of(earlier), blocks)
    n_aligned = differs.n_aligned if differs else min(len(blocks), len(blocks_of(earlier)))
    known = [block.index for block in blocks[:n_aligned] if block.kind == MESSAGE]
    n_of_system = int(bool(body.get("system") or body.get("instructions")))
    n_known = max(known, default=n_of_system - 1) + 1 - n_of_system
    return {**before, name: [*as_list(before.get(name)), *items[n_known:]]}


def with_nonce(body: Body, nonce: str) -> Body:
    """A body whose first text begins otherwise than any that the server has cached."""
    text = json.dumps(body)
    for name in ("system", "instructions", "prompt", "input", "messages"):
        first = first_text(body.get(name))
        if first:
            quoted = json.dumps(first)
            begun = json.dumps(f"{nonce} {first}")
            changed: Body = json.loads(text.replace(quoted, begun, 1))
            return changed
    return body


def first_text(value: object) -> str:
    """The first text of a prompt, or of its messages and their parts."""
    if isinstance(value, str):
        return value
    for item in as_list(value):
        if isinstance(item, dict):
            text = first_text(item.get("text") or item.get("content"))
            if text:
                return text
    return ""


def ready_to_send(call: RecordedCall, body: Body) -> Body:
    """A body for an answer as long as the recorded one."""
    body = {name: value for name, value in body.items() if name != "cache_prompt"}
    if call.n_gen:
        length = next((name for name in LENGTHS if name in body), LENGTHS[0])
        body[length] = call.n_gen
        if call.endpoint.server == LLAMA_SERVER:
            body["ignore_eos"] = True
    return body


def path_of(call: RecordedCall) -> str:
    """Where a call was sent."""
    if call.endpoint.api in ("chat", "generate"):
        return f"/api/{call.endpoint.api}"
    if call.endpoint.api == "messages" or is_of_messages_api(call.body):
        return "/v1/messages"
    if is_of_responses_api(call.body):
        return "/v1/responses"
    return "/v1/chat/completions" if "messages" in call.body else "/v1/completions"


async def send_again(
    calls: Sequence[RecordedCall], server: Access, address: str, again: Sequence[RecordedCall]
) -> None:
    """Send the session without its causes, each call once those before are recorded in `again`:
    what the server is asked about a call takes no time of the next one. LabError if one fails."""
    from aiohttp import ClientSession

    async with ClientSession(headers=dict(all_headers(server))) as client:
        for n_sent, (call, body) in enumerate(zip(calls, mended(calls), strict=True)):
            await until_recorded(again, n_sent)
            async with client.post(f"{address}{path_of(call)}", json=body) as answer:
                await answer.read()
                if answer.status >= 400:
                    raise LabError(
                        f"The server answered call {call.call} with HTTP {answer.status}.",
                        "Start it as it was for the recording (model, context, template).",
                    )


async def until_recorded(again: Sequence[RecordedCall], n_calls: int) -> None:
    """Wait until calls are recorded, for a while: a call without a prompt never is."""
    deadline = time.monotonic() + MOST_WAIT_S
    while len(again) < n_calls and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)


def compared(calls: Sequence[RecordedCall], again: Sequence[RecordedCall]) -> Section:
    """The recorded, the predicted and the measured seconds of each call, and of the session."""
    table = figures.bill(calls)
    removed_s = []
    for call, row in zip(calls, table.itertuples(), strict=True):
        is_removed = call.cause is not None and call.cause.by == CLIENT
        removed_s.append(row.again_s if is_removed and row.again_s == row.again_s else 0.0)
    rows = []
    for call, saved_s, repeated in zip(calls, removed_s, again, strict=True):
        recorded_s = call.ended_ns / 1e9
        rows.append((call.call, recorded_s, recorded_s - saved_s, repeated.ended_ns / 1e9))
    columns: Columns[tuple[int, float, float, float]] = (
        Column("call", lambda row: str(row[0])),
        Column("recorded\ns", lambda row: digits(row[1])),
        Column("predicted\ns", lambda row: digits(row[2])),
        Column("measured\ns", lambda row: digits(row[3])),
    )
    answer = verdict(calls, sum(row[2] for row in rows), sum(row[3] for row in rows))
    answer += others_of(calls, again)
    title = "The session without what its client changed"
    return Section(title, name="check", answer=answer, **tabled(columns, rows))


def others_of(calls: Sequence[RecordedCall], again: Sequence[RecordedCall]) -> str:
    """How much longer the calls without a cause took than when they were recorded: the prediction
    takes them as recorded, so this part of its error is the machine's."""
    pairs = [pair for pair in zip(calls, again, strict=True) if pair[0].cause is None]
    recorded_ns = sum(call.ended_ns for call, _ in pairs)
    if recorded_ns == 0:
        return ""
    more = sum(repeated.ended_ns for _, repeated in pairs) / recorded_ns - 1
    return (
        f" Calls without a cause took {abs(more):.1%} {'more' if more > 0 else 'less'} time "
        "than when they were recorded."
    )


def verdict(calls: Sequence[RecordedCall], predicted_s: float, measured_s: float) -> str:
    """How far the prediction is from the measurement, and whether its range holds it."""
    mends = [mend for mend in figures.mends(calls) if mend.cause[0] == CLIENT]
    off = predicted_s / measured_s - 1
    which = "long" if off > 0 else "short"
    text = (
        f"Without its causes the session takes {seconds(measured_s)}; predicted were "
        f"{seconds(predicted_s)}, {abs(off):.1%} too {which}"
    )
    lows = [mend.low_s for mend in mends if mend.low_s is not None]
    highs = [mend.high_s for mend in mends if mend.high_s is not None]
    if not mends or len(lows) < len(mends):
        return f"{text} (range unknown)."
    saved_s = sum(mend.saved_s or 0.0 for mend in mends)
    least_s = predicted_s + saved_s - sum(highs)
    most_s = predicted_s + saved_s - sum(lows)
    is_inside = "within" if least_s <= measured_s <= most_s else "outside"
    return f"{text}, {is_inside} its range of {digits(least_s)} to {digits(most_s)} s."
