"""The plans of `lab choose`: a model's runs, and those of vocabularies of other sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lab.core import script
from lab.core.arguments import Numbers
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
from lab.runner import pace, placement
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import DEFAULT_REPEAT, make_plan, with_cases
from lab.runner.refusals import need_every_position, whole_numbers

DEFAULT_SEQUENCES = "1,8,32"
DEFAULT_VOCABULARIES = "32000,65536,128256,151936,262144"
PROMPT_LEN = 1024  # so that the longest window of the penalties is full
GEN = 12
LEAST_GEN = 4
FEWEST_STEPS = 2  # with each chain, forth and back, of many sequences
LIST_BYTES = 12  # of a token in a list of candidates: number, logit, probability
N_LISTS = 2  # of a chain: that of its sampler, and a sorted copy
LOGIT_BYTES = 4
NS_PER_CANDIDATE = 80
"""Nanoseconds that a chain takes for each token of the vocabulary, in the mean over the lab's
chains: of 2 virtual cores of an AMD EPYC, for an announced time only."""

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
    check_number("gen", gen, 1000, LEAST_GEN)
    settings = {"kv_unified": "on", **settings}
    n_repeat = DEFAULT_REPEAT if repeat is None else repeat
    plain = make_plan(worker, [prompt_len], gen, n_repeat, model, **settings)
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
    changed = with_cases(plain, cases, partial(write, chains))
    check_memory(changed)
    return changed


def check_memory(plan: Plan) -> None:
    """LabError if the chains of a case do not fit into memory beside the model."""
    available = placement.memory_for(plan)
    n_vocab = plan.model.n_vocab
    if available is None or n_vocab is None:
        return
    for case in plan.cases:
        choosing = case.setup
        assert isinstance(choosing, Choosing)
        needed = plan.memory(case).total_bytes + chain_bytes(choosing, n_vocab)
        if needed > available:
            raise LabError(
                f"{label(choosing)} and a vocabulary of {plural(n_vocab, 'token')} need about "
                f"{needed / 1e9:,.1f} GB of memory; {available / 1e9:,.1f} GB are available.",
                "Use fewer --sequences, or a few chains of your own (--chain).",
            )


def chain_bytes(choosing: Choosing, n_vocab: int) -> int:
    """What the chains of a run keep beside the context: lists of candidates, until its end, and a
    row of logits for each sequence."""
    n_chains = len(choosing.order) * choosing.n_seq
    n_bytes = n_chains * N_LISTS * LIST_BYTES + choosing.n_seq * LOGIT_BYTES
    return n_bytes * n_vocab


def expected_s(worker: Worker, plans: Sequence[Plan]) -> float:
    """Seconds that all plans will take, of a short warm-up with the first plan's model."""
    speed = pace.measured(worker, plans[0], lambda status: None)
    worker.restart()
    total_s = 0.0
    for plan in plans:
        total_s += speed.seconds([plan], plan.n_repeat)
        for case in plan.cases:
            n_candidates = plan.n_tokens(case)[1] * (plan.model.n_vocab or 0)
            total_s += plan.n_repeat * n_candidates * NS_PER_CANDIDATE / 1e9
    return total_s


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
    n_repeat = DEFAULT_REPEAT if repeat is None else repeat
    plain = make_plan(worker, [RANDOM_PROMPT], gen, n_repeat, str(path), **settings)
    return _with_chains(plain, chains or named_chains.without_texts(seed), [1], gen)


def is_mine(line: object) -> bool:
    """Whether a line of a results file is one of the runs."""
    return isinstance(line, Record) and line.run.experiment == NAME
