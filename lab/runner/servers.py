"""A server that is to be measured: reached, looked at, and given prompts of exactly n of its tokens.

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
from lab.endpoints import access as reaching
from lab.endpoints import formats, probe, prompts
from lab.endpoints.access import Access
from lab.endpoints.client import Client
from lab.endpoints.prompts import Counter, Prompt
from lab.endpoints.send_plan import TIMEOUT_S, Ask, Reply, SendPlan
from lab.errors import LabError
from lab.runner import machine
from lab.runner.prompts import TEXT, offset, source


class Reaching(TypedDict, total=False):
    """How to reach a server, and for how long to wait for it."""

    api: str | None  # chat or completions; None: what it has
    api_key_env: str | None  # the environment variable that holds the key
    header: Sequence[str]  # each written NAME: VALUE
    timeout: float  # seconds after which a request times out


def reaching_of(options: Mapping[str, Any]) -> Reaching:
    """Of `options` those that say how to reach a server."""
    how = {name: options[name] for name in Reaching.__annotations__ if name in options}
    return cast(Reaching, how)


@dataclass(frozen=True)
class Server(probe.Probed):
    """A server as it was found, and the client that asks it."""

    access: Access
    client: Client
    machine: Machine  # of the client

    @property
    def model_name(self) -> str:
        """The model as records name it."""
        return short_name(self.model)

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

    def too_long(self, n_prompt: int, n_gen: int) -> LabError | None:
        """Why a request of this length does not fit into the server's context; None where it fits, or may fit."""
        n_ctx = self.endpoint.settings.n_ctx if self.endpoint.settings else None
        if n_ctx is None or n_prompt + n_gen <= n_ctx:
            return None
        return LabError(
            f"{n_prompt:,} prompt tokens and {n_gen:,} more do not fit into the server's context of {n_ctx:,} tokens "
            "(of one request).",
            "Ask for less, or start the server with a longer context.",
        )

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

    def send(self, ask: Ask) -> Reply:
        """Send one request, and wait for its answer."""
        plan = SendPlan(asks=(ask,), api=self.endpoint.api, timeout_s=self.access.timeout_s)
        (reply,) = self.client.run(plan)
        return reply

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

    def new_file(self, folder: Path, n_requests: int, n_gen: int) -> Path:
        """A results file with room for `n_requests` of `n_gen` tokens each. LabError where the disk lacks it."""
        where = machine.slug(self.endpoint.server or "server")
        n_bytes = min(n_requests * (4000 + 60 * n_gen), MOST_RESERVED_BYTES)
        return results.new_file(folder, f"{machine.slug(self.model_name)}-{where}", n_bytes)


MOST_RESERVED_BYTES = 256_000_000
"""The most room on the disk that is checked beforehand."""


@contextmanager
def connect(
    url: str,
    model: str | None = None,
    say: Callable[[str], object] = lambda words: None,
    **how: Unpack[Reaching],
) -> Iterator[Server]:
    """Look at the server at `url` and be ready to ask it; the client's process ends with the block.

    `model` is the server's name for it (None: its only one); `say` is called with a sentence now and then while the
    first answers are waited for. LabError where the server cannot be reached, the model is not clear, or it streams no
    answer.
    """
    asked = reaching.access(url, how.get("api_key_env"), how.get("header", ()), how.get("timeout", TIMEOUT_S))
    with Client(asked) as client:
        probed = probe.probe(asked, client, model, how.get("api"), say)
        yield Server(**vars(probed), access=asked, client=client, machine=machine.describe())


def prompt_text(prompt: str) -> str:
    """The text from which prompts are cut. LabError for random token ids, which no server takes."""
    text = source(prompt).text
    if text is None:
        raise LabError(
            f"--prompt {prompt} is not possible through a server, which takes text and not tokens.",
            f"Use --prompt {TEXT}, some of the lab's texts by name, or a text file.",
        )
    return text
