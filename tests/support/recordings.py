"""Requests that lab record sees."""

from __future__ import annotations

from typing import Any

from lab.core.request import Endpoint
from lab.features.recording import breaks
from lab.features.recording.lines import Cause, RecordedCall
from tests.support.records import MACHINE

TEXTS = (
    "You are an agent of the workshop. Answer briefly.",
    "Find the broken test in the folder of tools.",
    "I look at the folder first, then at each file.",
    "total 5: anvil.py bellows.py chisel.py drill.py emery.py and nothing else",
    "Only the chisel has a test, and it fails.",
    "Repair it, and say what was wrong.",
)


ROLES = ("system", "user", "assistant", "tool", "assistant", "user")


Messages = list[dict[str, Any]]


def messages() -> Messages:
    return [{"role": role, "content": text} for role, text in zip(ROLES, TEXTS, strict=True)]


def with_next(of_messages: Messages) -> Messages:
    """The messages of the next call."""
    more = [
        {"role": "assistant", "content": "The chisel was blunt."},
        {"role": "user", "content": "Sharpen it then."},
    ]
    return [*of_messages, *more]


def recorded(
    call: int, n_prompt: int | None, n_cached: int | None, prefill_s: float, **more: Any
) -> RecordedCall:
    fields: dict[str, Any] = {
        "session": "a-session",
        "machine": MACHINE,
        "endpoint": Endpoint(url="http://127.0.0.1:8080/v1", api="completions"),
        "model": "a-model",
        "started_at": "2026-01-01T00:00:00Z",
        "call": call,
        "conversation": 1,
        "turn": call,
        "http_status": 200,
        "begin_ns": 10**10 * call,
        "ttft_ns": round(prefill_s * 1e9),
        "ended_ns": round(prefill_s * 1e9) + 10**9,
        "n_prompt": n_prompt,
        "n_cached": n_cached,
        "n_gen": 10,
        "follows": call - 1 or None,
        "is_exact": True,
    }
    return RecordedCall(**{**fields, **more})


CLOCK = Cause(
    kind=breaks.CHANGED,
    by="client",
    part="message",
    index=0,
    role="system",
    text_field="content",
    character=1203,
    what="a time of day",
)


def session_with_a_clock(says_cached: bool = True) -> list[RecordedCall]:
    """Prefill takes 2 ms a token. Calls 3 and 5 read all again because of a clock."""
    calls = []
    for call in range(1, 7):
        n_prompt = 1000 + 100 * call
        n_cached = 0 if call == 1 else n_prompt - 100
        cause = None
        if call in (3, 5):
            n_cached = 0
            cause = CLOCK
        prefill_s = 0.002 * (n_prompt - n_cached)
        shown = n_cached if says_cached else None
        calls.append(recorded(call, n_prompt, shown, prefill_s, n_new=100, cause=cause))
    return calls
