"""A server that is to be measured: reached, looked at, and given prompts of exactly n of its tokens.

with connect("http://127.0.0.1:8080/v1") as server:
    prompt = server.prompt(1000, text, seed=1, repeat=0)
    plan = SendPlan(asks=(server.ask(prompt, asked),), api=server.endpoint.api)
    for reply in server.client.run(plan):
        results.save(path, server.record(session, server.counted(ask, reply)))
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.core import results
from lab.core.record import Machine
from lab.core.request import Asked, Endpoint, Request, RequestRecord
from lab.endpoints import access as reaching
from lab.endpoints import formats, probe, prompts
from lab.endpoints.access import Access
from lab.endpoints.client import Client
from lab.endpoints.prompts import Counter, Prompt
from lab.endpoints.send_plan import TIMEOUT_S, Ask, Reply
from lab.errors import LabError
from lab.runner import machine
from lab.runner.prompts import offset


@dataclass(frozen=True)
class Server:
    """A server as it was found, and the client that asks it."""

    access: Access
    client: Client
    endpoint: Endpoint
    own_name: str = field(repr=False)  # of the model, as the server calls it: it may quote a secret
    model: str  # the same, as it is shown
    models: tuple[str, ...]
    counter: Counter | None  # None: nobody can count the tokens of a prompt
    machine: Machine  # of the client

    @property
    def model_name(self) -> str:
        """The model as records name it."""
        return probe.short_name(self.model)

    def prompt(self, n: int, text: str, seed: int, repeat: int) -> Prompt:
        """A prompt of n tokens, cut from `text` at a place that depends on the seed and the repeat.

        LabError where the server cannot count tokens, or n is not possible.
        """
        start = offset(seed, repeat, len(text.split()))
        return prompts.make(n, self.how_to_count, text, random.Random(), start)

    @property
    def how_to_count(self) -> Counter:
        """How the server counts the tokens of a prompt. LabError where it cannot."""
        if self.counter is None:
            raise LabError(
                f"The length of prompts for {self.endpoint.url} cannot be counted.",
                "The server has neither a tokenizer to ask nor counts of tokens in its answers.",
            )
        return self.counter

    def asked(self, prompt: Prompt, n_prompt: int, n_gen: int, **more: Any) -> Asked:
        """What a request with this prompt asks, as records keep it. `more`: other fields, such as the seed."""
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
        """The request for a prompt. Unless it is sent once, its prompt begins with another nonce each time."""
        nonce = None if is_sent_once else prompt.nonce
        return formats.ask_for(self.endpoint.api, self.own_name, prompt.text, asked, self.endpoint.accepted, nonce)

    @property
    def temperature(self) -> float | None:
        """0, or None where the server's models may refuse any (OpenAI's that reason)."""
        return formats.temperature(self.endpoint.accepted)

    @property
    def ignores_eos(self) -> bool | None:
        """True where the server can be asked not to end before the limit; None where not."""
        return True if formats.IGNORE_EOS in self.endpoint.accepted else None

    def counted(self, ask: Ask, reply: Reply) -> Request:
        """The request with a count of its tokens, where the stream had none; it may be sent once more for that."""
        return prompts.counted(self.access, self.endpoint.api, self.own_name, ask, reply)

    def record(self, session: str, request: Request, client_error_ns: tuple[int, int] | None = None) -> RequestRecord:
        """A request as a line of a results file. `client_error_ns` is that of selftest.client_error."""
        return RequestRecord(
            session=session,
            machine=self.machine,
            endpoint=self.endpoint,
            model=self.model_name,
            request=request,
            client_error_ns=client_error_ns,
        )

    def new_file(self, folder: Path, n_bytes: int) -> Path:
        """A results file for requests, with room for so many bytes. LabError where there is none."""
        where = machine.slug(self.endpoint.server or "server")
        return results.new_file(folder, f"{machine.slug(self.model_name)}-{where}", n_bytes)


@contextmanager
def connect(
    url: str,
    model: str | None = None,
    api: str | None = None,
    api_key_env: str | None = None,
    headers: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    say: Callable[[str], object] = lambda words: None,
) -> Iterator[Server]:
    """Look at the server at `url` and be ready to ask it; the client's process ends with the block.

    A request is given up after `timeout_s`; `say` is called with a sentence now and then while the first answers are
    waited for. LabError where the server cannot be reached, the model is not clear, or it streams no answer.
    """
    asked = reaching.access(url, api_key_env, headers, timeout_s)
    with Client(asked) as client:
        probed = probe.probe(asked, client, model, api, say)
        known = probed.endpoint, probed.own_name, probed.model, probed.models, probed.counter
        yield Server(asked, client, *known, machine.describe())
