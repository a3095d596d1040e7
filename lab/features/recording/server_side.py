"""A llama-server as a recording sees it: what it is asked after each call, and which slot served
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

from lab.core.lists import join_and
from lab.core.request import Endpoint, ServerSettings
from lab.errors import LabError, printable
from lab.features.recording.answers import Answer
from lab.features.recording.proxy import HUNG_UP, ProxiedCall
from lab.features.recording.server_log import Served, ServerLog
from lab.remote import rendering
from lab.remote.access import Access
from lab.remote.client import Client
from lab.remote.formats import as_count, as_dict, as_list

LLAMA_SERVER = "llama-server"
SPARE = 2  # tokens by which a slot may hold fewer than its prompt and answer
COMPARED = {
    "chat_template": "the chat template",
    "model_path": "the model",
    "build_info": "the version of the server",
    "total_slots": "the number of slots",
    "default_generation_settings.n_ctx": "the context",
}
"""Properties of a server whose change is told after it was started anew."""


@dataclass(frozen=True)
class Slot:
    """A slot of the server after a call."""

    number: int
    task: int | None  # its latest
    n_tokens: int | None  # that it holds
    is_busy: bool = False

    def may_hold(self, n_tokens: int) -> bool:
        """Whether it may hold the prompt and the answer of a call that has ended, with this number
        of tokens."""
        if self.is_busy:
            return False
        return self.n_tokens is None or n_tokens - SPARE <= self.n_tokens <= n_tokens


class ServerQuestions:
    """What a llama-server is asked after a call: its template's prompt, tokens, and its context.

    No other server is asked anything.
    """

    def __init__(self, access: Access, log: Path | None = None) -> None:
        self.n_ctx: int | None = None
        self.held: dict[int, int] = {}  # the latest task of each slot
        self.n_slots: int | None = None
        self.changed = ""  # since the server was started anew
        self._access = access
        self._client: Client | None = None
        self._settings: ServerSettings | None = None
        self._watcher: Client | None = None  # of another thread
        self._can_render = False
        self._has_looked = False
        self._log = ServerLog(log) if log else None
        self._has_slots = True
        self._n_starts = 0
        self._latest_task = -1
        self._recorded_tasks: dict[int, int] = {}  # the latest of each slot
        self._properties: dict[str, str] = {}

    def look_at(self, call: ProxiedCall, answer: Answer) -> None:
        """Find out from the first good answer whether the server is a llama-server."""
        if self._has_looked or not call.is_accepted or call.failure == HUNG_UP:
            return
        self._has_looked = True
        if answer.timings is None and call.server != "llama.cpp":
            return
        headers = self._access.headers
        if call.authorization:
            headers = (*headers, ("Authorization", call.authorization))
        self._client = Client(replace(self._access, headers=headers))
        self._watcher = Client(self._client.access)
        self._can_render = True
        self._look_at_properties(self._client)

    def _look_at_properties(self, client: Client) -> None:
        properties = client.object_at("/props")
        defaults = as_dict(properties.get("default_generation_settings"))
        self.n_ctx = as_count(defaults.get("n_ctx"))
        self._properties = compared(properties)
        self.n_slots = as_count(properties.get("total_slots"))
        self._settings = ServerSettings(n_slots=self.n_slots, n_ctx=self.n_ctx)

    def served(self, answer: Answer, slots: Sequence[Slot]) -> Served | None:
        """How the server served a call, by its slots and its log; None if it does not say."""
        if self._client is None:
            return None
        served = self._seen_at(self._client, answer, slots or self.slots())
        if self._log is not None and answer.n_prompt is not None:
            prefill_ms = answer.timings.prompt_ms if answer.timings else None
            n_computed = answer.n_prompt - (answer.n_cached or 0)
            logged = self._log.find(n_computed, prefill_ms)
            if logged is not None:
                self.held = self._log.held_after(logged)
                return logged
        return served

    def _seen_at(self, client: Client, answer: Answer, slots: Sequence[Slot]) -> Served | None:
        """Where the slots show a call: without its slot if several may have served it, without its
        task if its slot has served another call since. None if the server shows no slots."""
        self.held = {slot.number: slot.task for slot in slots if slot.task is not None}
        if not self.held:
            return None
        newest = max(self.held.values())
        if newest < self._latest_task:
            self._n_starts += 1
            self._recorded_tasks = {}
            before = self._properties
            self._look_at_properties(client)
            self.changed = differences(before, self._properties)
        self._latest_task = newest
        n_held = (answer.n_prompt or 0) + (answer.n_gen or 0)
        changed = [
            slot
            for slot in slots
            if self.held.get(slot.number) != self._recorded_tasks.get(slot.number)
        ]
        holding = [slot for slot in changed if slot.may_hold(n_held)]
        if len(holding) == 1:
            slot = holding[0]
            self._recorded_tasks[slot.number] = self.held[slot.number]
            return Served(slot.number, slot.task, start=self._n_starts)
        number = changed[0].number if len(changed) == 1 else None
        return Served(number, None, start=self._n_starts)

    def slots(self) -> list[Slot]:
        """The server's slots; none if it does not show them, or is not known yet."""
        if not self._has_slots or self._watcher is None:
            return []
        reply = self._watcher.ask(f"{self._access.root}/slots")
        self._has_slots = reply.status in (None, HTTPStatus.OK)
        slots = []
        for fields in map(as_dict, as_list(as_dict(reply.parsed).get("data"))):
            number = as_count(fields.get("id"))
            if number is not None:
                task = as_count(fields.get("id_task"))
                n_tokens = as_count(fields.get("n_prompt_tokens"))
                is_busy = fields.get("is_processing") is True
                slots.append(Slot(number, task, n_tokens, is_busy))
        return slots

    def endpoint(self, call: ProxiedCall) -> Endpoint:
        is_llama = self._settings is not None
        return Endpoint(
            url=self._access.url,
            api=printable(call.path.partition("?")[0].rpartition("/")[2])[:40],
            server=LLAMA_SERVER if is_llama else None,
            settings=self._settings,
        )

    def rendered(self, body: dict[str, object]) -> str | None:
        """The prompt as text; None if the server cannot say."""
        if self._client is None or not self._can_render:
            return None
        try:
            return rendering.apply_template(self._client, body)
        except LabError:
            return None

    def tokens(self, text: str) -> tuple[int, ...]:
        if self._client is None:
            return ()
        try:
            return rendering.tokenize(self._client, text) or ()
        except LabError:
            return ()

    def count(self, text: str) -> int | None:
        """Tokens of a text; None if the server cannot say."""
        return len(self.tokens(text)) or None

    def close(self) -> None:
        for client in (self._client, self._watcher):
            if client is not None:
                client.close()


def compared(properties: Mapping[str, object]) -> dict[str, str]:
    """The properties that are compared after a new start, by their names for the user; of a long
    text a hash."""
    values = {}
    for path, name in COMPARED.items():
        value: object = properties
        for key in path.split("."):
            value = as_dict(value).get(key)
        values[name] = hashlib.blake2b(str(value).encode(), digest_size=8).hexdigest()
    return values


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What of a server is not as it was before its new start."""
    names = [name for name, value in now.items() if before.get(name, value) != value]
    return f"{join_and(names)} changed" if names else ""
