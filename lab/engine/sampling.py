"""llama.cpp's samplers: a chain for each answer, built before the run, applied between its steps.

A grammar is applied as llama-server does it: the chain chooses a token, the grammar checks it, and
only a token that does not fit is chosen again, with the grammar before the chain
(`Sampling.grammar_first`: always so). The tokens of the prompt count for the penalties, not for the
grammar.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from lab.core.record import COPY, FORGET
from lab.core.sampling import NEED_VOCABULARY, Sampling
from lab.core.script import Operation
from lab.engine import devices
from lab.engine.bindings import gbnf_of_schema, llama_cpp
from lab.engine.llama import LlamaContext, Loaded, Logits
from lab.errors import LabError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lab.engine.llama import Rows

ROOT = b"root"
DRY_BASE = 1.75
DRY_ALLOWED_LENGTH = 2
DRY_LAST_N = 64
DRY_BREAKERS = (b"\n", b":", b'"', b"*")
XTC_THRESHOLD = 0.1
MIROSTAT_TAU = 5.0
MIROSTAT_ETA = 0.1
MIROSTAT_M = 100
"""llama-server's values of what has no option here."""

LEAST_KEPT = 0  # candidates that a sampler keeps at least

ONLY_TEXT_MODELS = (
    "This model has no vocabulary (its weights are random), so no {what} can be used."
)


def grammar(text: str, is_schema: bool) -> list[str]:
    """The lines of a GBNF grammar, of its own text or of a JSON schema.

    LabError with llama.cpp's reason if it is none.
    """
    if is_schema:
        try:
            text = gbnf_of_schema(text)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as problem:
            what = f"The JSON schema cannot become a grammar: {problem}."
            raise LabError(what, "Correct the schema.") from None
    sampler, reason = _compiled(None, text)
    if not sampler:
        raise LabError(f"llama.cpp does not accept the grammar: {reason}", "Correct the file.")
    llama_cpp().llama_sampler_free(sampler)
    return text.splitlines()


def _compiled(vocab: object, text: str) -> tuple[object, str]:
    """A sampler of a grammar, or none, and what llama.cpp printed of it: it logs no reason."""
    devices.clear_log()
    with tempfile.TemporaryFile() as printed:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            sampler = llama_cpp().llama_sampler_init_grammar(vocab, text.encode(), ROOT)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        printed.seek(0)
        lines = printed.read().decode(errors="replace").splitlines()
    for line in [*lines, *devices.log_lines()]:
        reason = line.strip().removeprefix("parse: error parsing grammar: ")
        if reason:
            return sampler, f"{reason[:300]}."
    return sampler, "it gave no reason."


def check(loaded: Loaded, sampling: Sampling | None) -> None:
    """LabError if a chain cannot be built for a loaded model."""
    if sampling is None or not sampling.needs_vocabulary:
        return
    lib = llama_cpp()
    if lib.llama_vocab_type(loaded.vocab) == lib.LLAMA_VOCAB_TYPE_NONE:
        what = "grammar" if sampling.grammar else "sampler that reads texts (dry, infill)"
        raise LabError(ONLY_TEXT_MODELS.format(what=what), "Use a model with trained weights.")


class Chain:
    """The samplers of one answer, which llama.cpp keeps until `free`."""

    def __init__(
        self,
        context: LlamaContext,
        sampling: Sampling,
        prompt: Sequence[int],
        candidates: Candidates,
    ) -> None:
        began = time.perf_counter_ns()
        self._lib = llama_cpp()
        self._context = context.pointer
        self.pointer = new_chain(context.loaded, sampling)
        for token in prompt[-_n_remembered(sampling) :]:
            self._lib.llama_sampler_accept(self.pointer, token)
        self._grammar = None
        if sampling.grammar:
            text = "\n".join(sampling.grammar)
            self._grammar, reason = _compiled(context.loaded.vocab, text)
            if not self._grammar:
                raise LabError(f"llama.cpp does not accept the grammar: {reason}")
            if sampling.grammar_first:
                self._put_grammar_first()
        self._candidates = candidates
        self.built_ns = time.perf_counter_ns() - began

    def _put_grammar_first(self) -> None:
        outer = self._lib.llama_sampler_chain_init(_chain_params())
        self._lib.llama_sampler_chain_add(outer, self._grammar)
        self._lib.llama_sampler_chain_add(outer, self.pointer)
        self.pointer = outer
        self._grammar = None

    def choose(self, row: int, logits: Logits) -> int:
        """The token that the chain chooses from a row of the last step's logits."""
        if self._grammar is None:
            return int(self._lib.llama_sampler_sample(self.pointer, self._context, row))
        return self._choose_and_check(logits.row(row))

    def _choose_and_check(self, logits: npt.NDArray[np.float32]) -> int:
        lib = self._lib
        candidates = self._candidates
        candidates.fill(logits)
        token = candidates.chosen_by(self.pointer)
        if not self._fits(token):
            candidates.fill(logits)
            candidates.apply(self._grammar)
            token = candidates.chosen_by(self.pointer)
        lib.llama_sampler_accept(self._grammar, token)
        lib.llama_sampler_accept(self.pointer, token)
        return token

    def _fits(self, token: int) -> bool:
        """Whether the grammar allows a token."""
        lib = self._lib
        candidate = lib.llama_token_data(id=token, logit=1.0, p=0.0)
        only = lib.llama_token_data_array(
            data=ctypes.pointer(candidate), size=1, selected=-1, sorted=False
        )
        lib.llama_sampler_apply(self._grammar, ctypes.byref(only))
        return bool(candidate.logit != float("-inf"))

    def free(self) -> None:
        self._lib.llama_sampler_free(self.pointer)
        if self._grammar:
            self._lib.llama_sampler_free(self._grammar)


class Candidates:
    """Every token with its logit, as samplers take them: one list for all chains of a run."""

    def __init__(self, n_vocab: int) -> None:
        import numpy as np

        lib = llama_cpp()
        fields = [("id", np.int32), ("logit", np.float32), ("p", np.float32)]
        tokens = np.zeros(n_vocab, dtype=fields)
        tokens["id"] = np.arange(n_vocab)
        self._unsorted = tokens.tobytes()
        self._logits = tokens["logit"]
        self._n_vocab = n_vocab
        self._data = tokens.ctypes.data
        data = tokens.ctypes.data_as(ctypes.POINTER(lib.llama_token_data))
        self._array = lib.llama_token_data_array(data=data, size=n_vocab)

    def fill(self, logits: npt.NDArray[np.float32]) -> None:
        """Begin anew with a row of logits."""
        ctypes.memmove(self._data, self._unsorted, len(self._unsorted))
        self._logits[:] = logits
        self._array.size = self._n_vocab
        self._array.selected = -1
        self._array.sorted = False

    def apply(self, sampler: object) -> None:
        llama_cpp().llama_sampler_apply(sampler, ctypes.byref(self._array))

    def chosen_by(self, chain: object) -> int:
        """The token that a chain selects."""
        self.apply(chain)
        return int(self._array.data[self._array.selected].id)


def _n_remembered(sampling: Sampling) -> int:
    """Tokens of a prompt that samplers look at."""
    return max(sampling.repeat_last_n, DRY_LAST_N)


def _chain_params() -> object:
    params = llama_cpp().llama_sampler_chain_default_params()
    params.no_perf = True
    return params


def new_chain(loaded: Loaded, sampling: Sampling) -> object:
    """llama.cpp's chain as llama-server builds it, without the grammar."""
    lib = llama_cpp()
    chain = lib.llama_sampler_chain_init(_chain_params())
    if sampling.mirostat:
        samplers = _mirostat(loaded, sampling)
    else:
        samplers = [_sampler(name, loaded, sampling) for name in sampling.samplers]
        samplers.append(lib.llama_sampler_init_dist(sampling.seed))
    for sampler in samplers:
        if sampler:
            lib.llama_sampler_chain_add(chain, sampler)
    return chain


def _mirostat(loaded: Loaded, sampling: Sampling) -> list[object]:
    lib = llama_cpp()
    temperature = lib.llama_sampler_init_temp(sampling.temp)
    if sampling.mirostat == 2:
        last = lib.llama_sampler_init_mirostat_v2(sampling.seed, MIROSTAT_TAU, MIROSTAT_ETA)
    else:
        last = lib.llama_sampler_init_mirostat(
            loaded.n_vocab, sampling.seed, MIROSTAT_TAU, MIROSTAT_ETA, MIROSTAT_M
        )
    return [temperature, last]


def _sampler(name: str, loaded: Loaded, sampling: Sampling) -> object:
    """The sampler of a name; None for one that is off and would read texts."""
    lib = llama_cpp()
    if name in NEED_VOCABULARY:
        if name == "infill":
            return lib.llama_sampler_init_infill(loaded.vocab)
        return _dry(loaded, sampling) if sampling.dry_multiplier else None
    makers: dict[str, Callable[[], object]] = {
        "penalties": lambda: lib.llama_sampler_init_penalties(
            loaded.n_vocab,
            sampling.repeat_last_n,
            sampling.repeat_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        ),
        "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(-1.0),
        "top_k": lambda: lib.llama_sampler_init_top_k(sampling.top_k),
        "typ_p": lambda: lib.llama_sampler_init_typical(sampling.typical, LEAST_KEPT),
        "top_p": lambda: lib.llama_sampler_init_top_p(sampling.top_p, LEAST_KEPT),
        "min_p": lambda: lib.llama_sampler_init_min_p(sampling.min_p, LEAST_KEPT),
        "xtc": lambda: lib.llama_sampler_init_xtc(
            sampling.xtc_probability, XTC_THRESHOLD, LEAST_KEPT, sampling.seed
        ),
        "temperature": lambda: lib.llama_sampler_init_temp_ext(sampling.temp, 0.0, 1.0),
    }
    return makers[name]()


def _dry(loaded: Loaded, sampling: Sampling) -> object:
    breakers = (ctypes.c_char_p * len(DRY_BREAKERS))(*DRY_BREAKERS)
    return llama_cpp().llama_sampler_init_dry(
        loaded.vocab,
        sampling.dry_multiplier,
        DRY_BASE,
        DRY_ALLOWED_LENGTH,
        DRY_LAST_N,
        breakers,
        len(DRY_BREAKERS),
    )


class Answers:
    """The chains of a run: each answer of a sequence has its own, which knows its prompt."""

    def __init__(self, context: LlamaContext) -> None:
        self._context = context
        self._prompts: dict[int, list[int]] = {}  # by sequence: the tokens of its prompts
        self._latest: dict[int, Chain | None] = {}  # by sequence; None: greedy
        self._chains: list[Chain] = []

    @cached_property
    def _candidates(self) -> Candidates:
        return Candidates(self._context.loaded.n_vocab)

    def follow(self, operation: Operation) -> list[Chain | None]:
        """The chain of each token that an operation chooses (None: greedy), one after the other.

        The draft model always chooses greedily.
        """
        if operation.of_draft:
            return [None] * operation.n_outputs
        prompt = self._prompts.get(operation.sequence, [])
        if operation.kind == FORGET:
            self._prompts[operation.sequence] = prompt[: operation.first]
        elif operation.kind == COPY:
            self._prompts[operation.target] = list(prompt)
        chains: list[Chain | None] = []
        for part in operation.parts:
            if part.tokens is not None:
                self._prompts.setdefault(part.sequence, []).extend(part.tokens)
                if part.n_outputs:
                    self._begin(part.sequence, operation)
            chains += [self._latest.get(part.sequence)] * part.n_outputs
        return chains

    def _begin(self, sequence: int, operation: Operation) -> None:
        """The chain of a new answer."""
        sampling = operation.sampling or self._context.settings.sampling
        if sampling is None:
            self._latest[sequence] = None
            return
        check(self._context.loaded, sampling)
        prompt = self._prompts[sequence]
        chain = Chain(self._context, sampling, prompt, self._candidates)
        self._latest[sequence] = chain
        self._chains.append(chain)

    @property
    def built_ns(self) -> tuple[int, ...]:
        """What it took to build each chain: almost nothing, or to compile its grammar."""
        return tuple(chain.built_ns for chain in self._chains)

    def free(self) -> None:
        with suppress(IndexError):
            while True:
                self._chains.pop().free()


def choose(logits: Logits, rows: Rows, chains: Sequence[Chain | None]) -> None:
    """Write each row's token into its slot, and copy it into the batches that need it."""
    for (row, slot, targets), chain in zip(rows, chains, strict=True):
        if chain is None:
            logits.row(row).argmax(None, slot)
        else:
            slot[()] = chain.choose(row, logits)
        for target in targets:
            target[()] = slot
