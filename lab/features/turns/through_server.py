"""A conversation through a server, which answers in its own words."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from lab.core import results
from lab.core.experiments import case_of
from lab.core.lists import plural
from lab.core.record import OK
from lab.core.request import CHAT, COMPLETIONS, Asked, RequestRecord
from lab.errors import LabError
from lab.features.turns import planning
from lab.features.turns.conversation import (
    NAME,
    SECOND,
    Conversation,
    Transcript,
    parse_breaks,
)
from lab.features.turns.recorded_calls import Body, Recording, read_recording
from lab.features.turns.recorded_turns import RecordedTurns, prepared
from lab.features.turns.server_figures import TurnPlace
from lab.remote import formats
from lab.remote.servers import TOKENIZE, Server, prompt_text
from lab.remote.watching import RequestWatch, server_pids
from lab.runner.progress import ShowStatus, Status

TOKENS_PER_WORD = 1.3  # of a server that cannot count tokens
N_COUNTED = 300  # words from which the tokens of a word are estimated
N_COLD = 2  # tokens of an answer without a cache: only its TTFT is used
SYSTEM, FIRST_MESSAGE = range(2)  # the parts of a prompt
PART = re.compile(r"\s*\S+\s*")

Words = list[str]


class ColdTurn(NamedTuple):
    """A turn whose prompt has other first letters, so that no cache has it."""

    number: int
    body: Body


@dataclasses.dataclass(frozen=True)
class Sender:
    """Sends the turns of a conversation, and keeps their records in a results file."""

    conversation: Conversation
    server: Server
    path: Path
    pids: Sequence[int] = ()  # of the server, if it is on this machine

    def options(self, place: TurnPlace) -> tuple[str, ...]:
        """The server's options; the one that turns its cache off only where nothing may come from
        it: what an earlier session left there is no part of the first turn."""
        accepted = self.server.endpoint.accepted
        if place.must_be_cold:
            return accepted
        return tuple(option for option in accepted if option != formats.NO_CACHE)

    def body(self, parts: Sequence[Words]) -> Body:
        """The body of a request with this prompt."""
        return formats.prompt_fields(self.server.endpoint.api, list(map("".join, parts)))

    def send(
        self, body: Body, n_gen: int, place: TurnPlace, n_counted: int | None = None
    ) -> tuple[RequestRecord, str]:
        """Send the body of a request, of whose prompt `n_counted` are the tokens; returns its
        record, which is not kept yet, and the answer."""
        options = self.options(place)
        limits = formats.limits(options)
        if "tools" in body:  # a call of a tool ends where its grammar says
            limits["ignore_eos"] = None
        asked = Asked(
            n_prompt=None,
            n_prompt_counted=n_counted,
            counted_by=None if n_counted is None else TOKENIZE,
            n_gen=n_gen,
            experiment=NAME,
            case=case_of(self.conversation),
            place=vars(place),
            **limits,
        )
        request = formats.ask_of_fields(self.server.model, body, asked, options)
        api = CHAT if "messages" in body else COMPLETIONS
        watch = RequestWatch(self.pids, lambda: None)
        reply = self.server.client.send(request, api, watch=watch.look)
        record = self.server.record(self.path.stem, reply.request, watch.finish())
        return record, reply.text

    def keep(self, record: RequestRecord) -> RequestRecord:
        results.save(self.path, record)
        return record

    def send_again(
        self, turns: Iterable[ColdTurn], watch: ShowStatus
    ) -> Iterator[RequestRecord]:
        """Send turns again without a cache."""
        for turn in turns:
            watch(Status(f"turn {turn.number} without a cache"))
            place = TurnPlace(turn.number, is_cold=True)
            record, _ = self.send(turn.body, N_COLD, place)
            yield self.keep(record)


def sender_of(conversation: Conversation, server: Server, path: Path) -> Sender:
    """A sender that watches this machine during each request, if the server is on it."""
    return Sender(conversation, server, path, server_pids(server.client.access))


def cold_turns(conversation: Conversation) -> list[int]:
    """The turns that are sent again without a cache: one in the middle, and the last one."""
    middle = conversation.n_turns // 2 + 1
    numbers = sorted({middle, conversation.n_turns})
    return [number for number in numbers if number > 1]


def execute(
    conversation: Conversation, server: Server, text: str, path: Path, watch: ShowStatus
) -> Iterator[RequestRecord]:
    """Send a request per turn, append each to `path`, and yield its record. A failed request ends
    the conversation.

    Messages are whole words of `text`, so their lengths in tokens are approximate. The first words
    differ in each session, so that the first turn finds no cache. A second conversation, which
    breaks the cache, is sent and not recorded.
    """
    sender = sender_of(conversation, server, path)
    source = PART.findall(text)
    nonce = nonce_words()
    in_words = conversation_in_words(
        conversation, tokens_per_word(server, source), n_nonce=len(nonce)
    )
    transcript = Transcript(in_words, lambda n: repeated(nonce, source, n))
    events = parse_breaks(conversation.breaks, conversation.n_turns)
    cold: list[ColdTurn] = []
    for number, n_gen in enumerate(conversation.answers, 1):
        watch(Status(f"turn {number} of {conversation.n_turns}"))
        turn = transcript.next_turn()
        place = TurnPlace(number)
        if number > 1:
            place = TurnPlace(number, len("".join(turn.prompt[: turn.n_cached])))
        if SECOND in events[number - 1]:
            system, message, *_ = turn.parts
            last_words = source[::-1]  # another conversation: the words backwards
            sender.send(sender.body([system, last_words[: len(message)]]), N_COLD, place)
        record, answer = sender.send(sender.body(turn.parts), n_gen, place)
        yield sender.keep(record)
        if record.request.status != OK:
            return
        transcript.answered(re.findall(r"\s+|\S+\s*", answer) or [" "])
        if number in cold_turns(conversation):
            parts = with_nonce(turn.parts, first_text(conversation), nonce_words())
            cold.append(ColdTurn(number, sender.body(parts)))
    yield from sender.send_again(cold, watch)


def replay(
    recorded: RecordedTurns, server: Server, path: Path, watch: ShowStatus
) -> Iterator[RequestRecord]:
    """Send recorded requests one after the other, append each to `path`, and yield its record. A
    failed request ends the replay.

    The recorded answers stay in later requests, whatever the server answers now.
    """
    conversation = recorded.conversation
    sender = sender_of(conversation, server, path)
    for number, n_gen in enumerate(conversation.answers, 1):
        watch(Status(f"turn {number} of {conversation.n_turns}"))
        place = TurnPlace(number, recorded.differs_at(number))
        body = recorded.bodies[number - 1]
        record, _ = sender.send(body, n_gen, place, recorded.n_prompt(number))
        yield sender.keep(record)
        if record.request.status != OK:
            return
    cold = [ColdTurn(n, recorded.cold_body(n)) for n in cold_turns(conversation)]
    yield from sender.send_again(cold, watch)


def nonce_words() -> Words:
    return [f"{letter} " for letter in formats.fresh_nonce().split()]


def repeated(nonce: Words, source: Words, n: int) -> Words:
    """n words: the nonce, then `source` again and again."""
    n_times = 1 + n // len(source)
    return [*nonce, *source * n_times][:n]


def first_text(conversation: Conversation) -> int:
    """The part of a prompt that begins it."""
    return SYSTEM if conversation.system else FIRST_MESSAGE


def with_nonce(parts: Sequence[Words], place: int, nonce: Words) -> list[Words]:
    """The parts of a prompt, the one at `place` with these first words instead of its own."""
    changed = list(parts)
    changed[place] = [*nonce, *parts[place][len(nonce) :]]
    return changed


def tokens_per_word(server: Server, source: Words) -> float:
    """How many tokens a word has; an estimate if the server cannot count."""
    if not server.counter:
        return TOKENS_PER_WORD
    sample = source[:N_COUNTED]
    n_tokens = server.counter.count("".join(sample))
    return n_tokens / len(sample) if n_tokens else TOKENS_PER_WORD


def conversation_in_words(
    conversation: Conversation, tokens_of_word: float, n_nonce: int
) -> Conversation:
    """The conversation with lengths in words; `n_nonce` words begin its first text."""

    def n_words(n_tokens: int) -> int:
        return max(2, round(n_tokens / tokens_of_word)) if n_tokens else 0

    n_system = n_words(conversation.system)
    n_messages = list(map(n_words, conversation.messages))
    n_answers = list(map(n_words, conversation.answers))
    if first_text(conversation) == SYSTEM:
        n_system += n_nonce
    else:
        n_messages[0] += n_nonce
    return dataclasses.replace(
        conversation,
        system=n_system,
        messages=tuple(max(1, n) for n in n_messages),
        answers=tuple(max(1, n) for n in n_answers),
    )


def converse(context: click.Context, url: str, options: dict[str, Any]) -> None:
    """`lab turns` through a server. LabError for options that only the lab's own cache has."""
    from lab.app.output import Output
    from lab.app.running import collect
    from lab.app.server import confirm, given
    from lab.remote.examination import connect, reaching_of
    from lab.show import console, text_requests

    given_options = given(context)
    if "keep" in given_options:
        raise LabError(
            "--keep is only for the lab's own engine, not for a server.",
            "Leave it out: a server keeps its cache where its own settings say.",
        )
    source = turns_of_options(options)
    confirm(url, f"{source.n_turns + 2} requests", options["yes"])
    output = Output.taken_from(options)
    err = console.console(stderr=True)
    err.print("examining the server ...")
    model = None
    if "model" in given_options:
        model = options["model"]
    with connect(url, model, err.print, **reaching_of(options)) as server:
        sending = sending_of(source, server, options["prompt"])
        for note in sending.notes:
            err.print(f"Note: {note}", style="yellow")
        if options["dry_run"]:
            err.print(extent(sending.conversation))
            return
        path = server.new_file(output.folder)
        records, problem = collect(
            lambda watch: sending.send(path, watch),
            path,
            err,
            None,
            text_requests.finished,
        )
        has_failed = any(record.request.status != OK for record in records)
        output.finish(records, path, problem, has_failed)


class Sending(NamedTuple):
    """The turns of a command, ready to be sent."""

    conversation: Conversation
    notes: list[str]
    send: Callable[[Path, ShowStatus], Iterator[RequestRecord]]


def turns_of_options(options: dict[str, Any]) -> Conversation | Recording:
    """The conversation of the command's options, or the recording to replay."""
    if options["replay"]:
        planning.check_replay(options["breaks"])
        return read_recording(Path(options["replay"]))
    return planning.conversation(
        options["system"],
        options["turn"],
        options["turns"],
        options["breaks"],
        options["seed"],
    )


def sending_of(source: Conversation | Recording, server: Server, prompt: str) -> Sending:
    """How the turns are sent to a server; `prompt` is the option with the text of messages."""
    if isinstance(source, Recording):
        recorded = prepared(source, server)
        return Sending(
            recorded.conversation, recorded.notes, partial(replay, recorded, server)
        )
    text = prompt_text(prompt)
    return Sending(source, [], partial(execute, source, server, text))


def extent(conversation: Conversation) -> str:
    """How many turns a conversation has, and how long their prompts are."""
    shortest = min(conversation.prompts)
    longest = max(conversation.prompts)
    n_turns = plural(conversation.n_turns, "turn")
    return f"{n_turns}, prompts of about {shortest:,} to {plural(longest, 'token')}"
