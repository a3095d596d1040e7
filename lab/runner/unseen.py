"""What cannot be measured through a server, and why: sentences that are shown before anything is measured."""

from __future__ import annotations

from collections.abc import Iterator

from lab.core.request import CHAT, NO, YES, Endpoint
from lab.endpoints.prompts import MOST_COUNTS, USAGE, Counter


def sentences(endpoint: Endpoint, counter: Counter | None, n_gen: int) -> Iterator[str]:
    """What is not visible of answers of `n_gen` tokens, from what the server was seen to be able to do."""
    how = {one.name: one.how for one in endpoint.capabilities}
    if endpoint.can("streaming") == NO:
        yield f"TTFT and TPOT are not visible, only E2E is: {how.get('streaming')}."
    elif endpoint.can("streaming") != YES:
        yield (
            f"Whether the server streams token by token is not known ({how.get('streaming')}): one that holds tokens "
            "back has a TTFT that is later than its first token."
        )
    own = " What the server says of its own times is shown apart." if endpoint.can("server timings") == YES else ""
    if endpoint.can("streaming") != NO:
        yield (
            "Prefill time is not visible from outside: TTFT stands for it, with the server's queue, its tokenizer and "
            f"its first token in it.{own}"
        )
    if endpoint.can("streaming") != NO and endpoint.can("tokens per event") != YES:
        yield (
            "No event says how many tokens it holds: gaps are those between events (inter-chunk latency), there is no "
            "ITL, and TPOT lies between two bounds wherever there are not as many events as tokens."
        )
    if endpoint.can("usage in streams") != YES:
        yield (
            "The stream does not count its tokens: each request is sent once more, not streamed, which costs one more "
            "generation. Where that answers differently, the server's tokenizer counts, if it has one; else TPOT is "
            "not known."
        )
    if endpoint.can("cached tokens") != YES:
        yield (
            "The server does not say how much of a prompt came from a cache: nobody can say whether a run was warm. "
            "Each prompt begins with letters of its own, so only the template before them can have come from one."
        )
    elif endpoint.api == CHAT and endpoint.server != "llama-server":  # which takes cache_prompt: false
        yield (
            "All chats share the template before their prompts, which the server may have in a cache: runs for which "
            "it says so are shown apart, as warm. --api completions has no template."
        )
    if endpoint.can("ignore_eos") != YES and n_gen > 1:
        yield f"Answers may end before {n_gen:,} tokens ({how.get('ignore_eos')}): those that do are shown apart."
    yield from _of_settings(endpoint)
    if counter is not None and counter.by == USAGE:
        yield (
            f"The server has no tokenizer to ask: a prompt of exactly n tokens is found by some requests for one token "
            f"(at most {MOST_COUNTS}), once for each length; its repeats differ in their first letters only."
        )


def _of_settings(endpoint: Endpoint) -> Iterator[str]:
    settings = endpoint.settings
    if settings is None or settings.n_ctx is None:
        yield "The server does not say how long its context is: a prompt that is too long for it fails."
    if settings is not None and settings.n_slots == 1:
        yield (
            "The server works on one request at a time: while it works on somebody else's, a run waits, and its TTFT "
            "is longer."
        )
    else:
        yield "What others ask the server meanwhile makes these runs slower, and cannot be seen from here."
