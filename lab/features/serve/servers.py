"""Connect to a server, examine it, and make prompts of exactly n of its tokens.

with connect("http://127.0.0.1:8080/v1") as server:
    prompt = server.prompt(1000, text, seed=1, repeat=0)
    ask = server.ask(prompt, server.asked(prompt, n_prompt=1000, n_gen=64))
    results.save(path, server.record(session, server.counted(ask, server.send(ask))))
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from lab.core import results
from lab.core.record import Machine
from lab.core.request import Asked, Request, RequestRecord, short_name
from lab.errors import LabError
from lab.features.serve import access as reaching
from lab.features.serve import formats, probe, prompts
from lab.features.serve.access import Access
from lab.features.serve.client import Client
from lab.features.serve.prompts import Counter, Prompt
from lab.features.serve.send_plan import TIMEOUT_S, Ask, Reply, SendPlan
from lab.runner import machine
from lab.runner.prompts import TEXT, offset, source


class Reaching(TypedDict, total=False):
    """How to reach a server, and how long to wait for it."""

    api: str | None  # chat or completions; None: what the server has
    api_key_env: str | None  # the environment variable with the key
    header: Sequence[str]  # each NAME: VALUE
    timeout: float  # seconds after which a request times out


def reaching_of(options: Mapping[str, Any]) -> Reaching:
    """The part of `options` that says how to reach a server."""
    how = {name: options[name] for name in Reaching.__annotations__ if name in options}
    return cast(Reaching, how)


@dataclass(frozen=True)
class Server(probe.Probed):
    """An examined server, and the client for it."""

    access: Access
    client: Client
    machine: Machine  # of the client

    @property
    def model_name(self) -> str:
        """The model as records name it."""
        return short_name(self.model)

    def prompt(self, n: int, text: str, seed: int, repeat: int) -> Prompt:
        """A prompt of n tokens, cut from `text` at a place given by the seed and the repeat.

        LabError if the server cannot count tokens, or n is too small.
        """
        start = offset(seed, repeat, len(text.split()))
        return prompts.make(n, self.how_to_count, text, random.Random(), start)

    @property
    def how_to_count(self) -> Counter:
        """The server's way to count the tokens of a prompt. LabError if it cannot."""
        if self.counter is None:
            raise LabError(
                f"The server at {self.endpoint.url} cannot count the tokens of prompts: it has no tokenizer endpoint, "
                "and no token counts in its answers.",
                "Turn one of them on, or measure another server.",
            )
        return self.counter

    def too_long(self, n_prompt: int, n_gen: int) -> LabError | None:
        """Why a request of this length does not fit into the server's context; None if it fits or may fit."""
        n_ctx = self.endpoint.settings.n_ctx if self.endpoint.settings else None
        if n_ctx is None or n_prompt + n_gen <= n_ctx:
            return None
        return LabError(
            f"{n_prompt:,} prompt tokens and {n_gen:,} more do not fit into the server's context of {n_ctx:,} tokens "
            "(of one request).",
            "Use fewer tokens, or start the server with a longer context.",
        )

    def asked(self, prompt: Prompt, n_prompt: int, n_gen: int, **more: Any) -> Asked:
        """The record's description of a request with this prompt. `more`: other fields, such as the seed."""
        return Asked(
            n_prompt=n_prompt,
            n_prompt_counted=prompt.n_tokens,
            counted_by=prompt.counted_by,
            n_gen=n_gen,
            temperature=self.temperature,
            ignore_eos=self.ignores_eos,
            prompt_sha256=hashlib.sha256(prompt.body.encode()).hexdigest(),
            **more,
        )

    def ask(self, prompt: Prompt, asked: Asked, is_sent_once: bool = False) -> Ask:
        """The request for a prompt. Unless it is sent only once, each sending gets another nonce."""
        nonce = None if is_sent_once else prompt.nonce
        return formats.ask_for(self.endpoint.api, self.own_name, prompt.text, asked, self.endpoint.accepted, nonce)

    @property
    def temperature(self) -> float | None:
        """0, or None if the server's models may reject a temperature."""
        return formats.temperature(self.endpoint.accepted)

    @property
    def ignores_eos(self) -> bool | None:
        """True if the server supports ignore_eos, otherwise None."""
        return True if formats.IGNORE_EOS in self.endpoint.accepted else None

    def send(self, ask: Ask) -> Reply:
        """Send one request, and wait for its answer."""
        plan = SendPlan(asks=(ask,), api=self.endpoint.api, timeout_s=self.access.timeout_s)
        (reply,) = self.client.run(plan)
        return reply

    def counted(self, ask: Ask, reply: Reply) -> Request:
        """The request with a token count, if the stream had none; this may send it once more."""
        return prompts.counted(self.access, self.endpoint.api, self.own_name, ask, reply)

    def record(self, session: str, request: Request) -> RequestRecord:
        """A request as a line of a results file."""
        return RequestRecord(
            session=session,
            machine=self.machine,
            endpoint=self.endpoint,
            model=self.model_name,
            request=request,
        )

    def new_file(self, folder: Path) -> Path:
        """A new results file."""
        where = machine.slug(self.endpoint.server or "server")
        return results.new_file(folder, f"{machine.slug(self.model_name)}-{where}")


@contextmanager
def connect(
    url: str,
    model: str | None = None,
    say: Callable[[str], object] = lambda words: None,
    **how: Unpack[Reaching],
) -> Iterator[Server]:
    """Examine the server at `url` and connect to it; the client's process ends with the block.

    `model` is the server's name for it (None: its only one). Calls `say` with a sentence every few seconds while it
    waits for the first answers. LabError if the server cannot be reached, the choice of the model is unclear, or it
    does not stream.
    """
    asked = reaching.access(url, how.get("api_key_env"), how.get("header", ()), how.get("timeout", TIMEOUT_S))
    with Client(asked) as client:
        probed = probe.probe(asked, client, model, how.get("api"), say)
        yield Server(**vars(probed), access=asked, client=client, machine=machine.describe())


def prompt_text(prompt: str) -> str:
    """The text from which prompts are cut. LabError for random token ids, which servers do not accept."""
    text = source(prompt).text
    if text is None:
        raise LabError(
            f"--prompt {prompt} is not possible through a server, which accepts only text.",
            f"Use --prompt {TEXT}, some of the lab's texts by name, or a text file.",
        )
    return text
