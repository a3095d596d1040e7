"""The plans of `lab choose`: a model's runs, and those of vocabularies of other sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lab.core import script
from lab.core.asked_settings import check_number
from lab.core.experiments import ExperimentRuns, setup_of
from lab.core.lists import plural
from lab.core.record import COPY, DECODE, FORGET, OK, PREFILL, Record, Run, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.features.choose import chains as named_chains, vocabularies
from lab.features.choose.chains import NamedChain
from lab.models import catalog
from lab.process.worker import Worker
from lab.roofline.choosing import BETWEEN, NAME, Choosing
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases
from lab.runner.refusals import Numbers, need_every_position, whole_numbers

DEFAULT_SEQUENCES = "1,8,32"
DEFAULT_VOCABULARIES = "32000,65536,128256,151936,262144"
PROMPT_LEN = 1024  # so that the longest window of the penalties is full
GEN = 12
FEWEST_STEPS = 4
MOST_SEQUENCES = 64
MOST_VOCABULARY = 2**20
LEAST_VOCABULARY = 1000
RANDOM_PROMPT = 1024


def figures(run: Run) -> dict[str, float]:
    """`choose_ms`: the mean time to choose a token, over all chains. Empty for a failed run."""
    times_ms: list[float] = []
    steps = run.steps
    if run.status != OK:
        return {}
    for kind, n_outputs, ready_ns, end_ns in zip(
        steps.kind, steps.n_outputs, steps.ready_ns, steps.end_ns, strict=True
    ):
        if kind == DECODE and n_outputs:
            times_ms.append((end_ns - ready_ns) / n_outputs / 1e6)
    choose_ms = sum(times_ms) / max(1, len(times_ms))
    return {"choose_ms": choose_ms} if choose_ms > 0 else {}


RUNS = ExperimentRuns(
    check=lambda case: setup_of(Choosing, case),
    label=lambda case: label(setup_of(Choosing, case)),
    figures=figures,
    figure_names={"choose_ms": "choosing a token"},
    kv_unified="on",
)


def label(choosing: Choosing) -> str:
    sequences = plural(choosing.n_seq, "sequence")
    return f"{sequences}, {plural(len(choosing.labels), 'chain')}"


def case(n_prompt: int, n_seq: int, n_steps: int, chains: Sequence[NamedChain]) -> Case:
    """n_steps with each chain, forth and back; all sequences share the prompt."""
    n_answer = n_steps + 1
    others = (n_answer + 1,) * (n_seq - 1)
    return Case(
        n_prompt,
        n_answer,
        experiment=NAME,
        setup=Choosing(n_seq, n_steps, BETWEEN.join(chain.label for chain in chains)),
        sequences=(n_prompt + n_answer, *others),
    )


def write(
    chains: Sequence[NamedChain], case: Case, text: Text, settings: Settings
) -> list[Operation]:
    """The script: the prompt once, then an answer of each sequence with each chain in turn."""
    choosing = case.setup
    assert isinstance(choosing, Choosing)
    prompt = text(0, case.n_prompt)
    sequences = range(choosing.n_seq)
    n_before = len(prompt) - 1
    last = Part(0, (prompt[-1],), 1)
    operations = script.prefill(0, prompt[:-1], settings.n_ubatch, is_last=False)
    operations += [Operation(COPY, target=sequence) for sequence in sequences[1:]]
    parts = tuple(Part(sequence, last.tokens, 1) for sequence in sequences)
    for block, number in enumerate(choosing.order):
        if block:
            for sequence in sequences:
                operations.append(Operation(FORGET, sequence=sequence, first=n_before))
        operations.append(Operation(PREFILL, parts, sampling=chains[number].sampling))
        operations += script.decode(sequences, choosing.n_steps)
    return operations


def plan(
    worker: Worker,
    sequences: Numbers = DEFAULT_SEQUENCES,
    chain: Sequence[str] = (),
    prompt_len: int = PROMPT_LEN,
    gen: int = GEN,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    **settings: Any,
) -> Plan:
    """The model's runs: every number of sequences with all chains. LabError if impossible."""
    n_seqs = whole_numbers("--sequences", sequences, MOST_SEQUENCES)
    check_number("prompt_len", prompt_len, 100_000, 2)
    check_number("gen", gen, 1000, FEWEST_STEPS)
    settings = {"kv_unified": "on", **settings}
    plain = make_plan(worker, [prompt_len], gen, repeat, model, **settings)
    need_every_position(plain.model)
    if plain.settings.n_batch < max(n_seqs):
        raise LabError(
            f"{max(n_seqs)} sequences do not fit into a batch of {plain.settings.n_batch}.",
            "Use a larger --batch, or fewer --sequences.",
        )
    seed = plain.settings.seed or 0
    if chain:
        chains = named_chains.asked(worker, chain, seed)
    elif plain.file.source == catalog.SYNTHETIC or vocabularies.is_random(plain.file.path):
        chains = named_chains.without_texts(seed)
    else:
        chains = named_chains.of_texts(worker, seed)
    return _with_chains(plain, chains, n_seqs, gen)


def _with_chains(
    plain: Plan, chains: Sequence[NamedChain], n_seqs: Sequence[int], gen: int
) -> Plan:
    cases: list[Case] = []
    for n_seq in n_seqs:
        n_steps = max(FEWEST_STEPS, math.ceil(gen / n_seq))
        cases.append(case(plain.cases[0].n_prompt, n_seq, n_steps, chains))
    return with_cases(plain, cases, partial(write, chains))


def sizes(vocabulary: Numbers | None) -> list[int]:
    """The sizes of vocabularies; none for 0 or an empty text. LabError if impossible."""
    if not vocabulary or vocabulary == "0":
        return []
    numbers = whole_numbers("--vocabulary", vocabulary, MOST_VOCABULARY)
    if min(numbers) < LEAST_VOCABULARY:
        raise LabError(
            f"A vocabulary of {min(numbers)} tokens is too small.",
            f"Give sizes from {LEAST_VOCABULARY:,}.",
        )
    return [number - number % vocabularies.MULTIPLE for number in numbers]


def plan_of_size(
    worker: Worker,
    n_vocab: int,
    folder: Path,
    gen: int = GEN,
    repeat: int | None = None,
    seed: int = 1,
    chains: Sequence[NamedChain] | None = None,
    **settings: Any,
) -> Plan:
    """The runs of a tiny model with random weights and a vocabulary of this size."""
    path = vocabularies.make(folder, n_vocab)
    random = {"prompt": "random", "kv_unified": "on"}
    settings = {**settings, **random, "seed": seed}
    plain = make_plan(worker, [RANDOM_PROMPT], gen, repeat, str(path), **settings)
    return _with_chains(plain, chains or named_chains.without_texts(seed), [1], gen)


def is_mine(line: Any) -> bool:
    """Whether a line of a results file is one of the runs."""
    return isinstance(line, Record) and line.run.experiment == NAME
