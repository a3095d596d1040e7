"""The plan of `lab speculate`, and the scripts of its runs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from lab.core import script, stats
from lab.core.arguments import Numbers, Texts
from lab.core.asked_settings import parts
from lab.core.drafts import LOOKUP
from lab.core.lists import plural
from lab.core.record import DECODE, DRAFT, FORGET, VERIFY, Model, Settings
from lab.core.script import OPEN_ENDED, Operation, Part
from lab.errors import LabError
from lab.features.speculate.setup import NAME, Speculation
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.runner import prompts
from lab.runner.cases import Case, Draft, Plan, Text
from lab.runner.plan import make_plan, parse_lengths, with_cases
from lab.runner.refusals import need_every_position, whole_numbers

DEFAULT_TEXTS = "code,table,story,dialogue"
CHILD = "lab.features.speculate.child"
"""What the engine's process loads for a script with drafts."""

N_TIMES = 5  # measurements of each step of the curve in a run
N_IN_A_ROW = 4
"""Steps of one position in each measurement: directly after a large step the first is slow."""


def plan(
    worker: Worker,
    draft: str | None,
    draft_len: Numbers,
    prompt_len: Numbers,
    gen: int,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    prompt: Texts | None = None,
    **settings: Any,
) -> Plan:
    """Blocks of all draft lengths and texts. LabError for impossible values.

    Of a model with random weights only single steps are timed.
    """
    is_random = catalog.parse(model).source == catalog.SYNTHETIC
    texts = [prompts.RANDOM] if is_random else prompt_sources(prompt)
    if is_random and (draft is not None or prompt not in (None, prompts.RANDOM)):
        raise LabError(
            f"{model} has random weights, so the acceptance of drafts says nothing.",
            "Leave --draft and --prompt out: then only steps are timed.",
        )
    n_blocks = stats.fewest_for_interval() if repeat is None else repeat
    planned = make_plan(
        worker, prompt_len, gen, n_blocks, model, prompt=",".join(texts), **settings
    )
    lengths = whole_numbers("--draft-len", parse_lengths(draft_len, "--draft-len"), 2**20)
    check_longest(lengths[-1], gen, planned.settings)
    need_every_position(planned.model)
    drafted_by = None if is_random else LOOKUP
    if draft not in (None, LOOKUP):
        watch = settings.get("watch", obtain.silently)
        spec = catalog.parse(str(draft))
        file = obtain.obtain(spec, worker, watch)
        drafting = Draft(file, obtain.read(worker, spec, file))
        check_draft(drafting, planned, worker)
        planned = dataclasses.replace(planned, draft=drafting)
        drafted_by = label_of(drafting.model)
    setups = [(Speculation(drafted_by, lengths[-1], None), texts[0])]
    if not is_random:
        for text in texts:
            name = prompts.source(text).name
            setups.append((Speculation(None, 0, name), text))
            setups += [(Speculation(drafted_by, n, name), text) for n in lengths]
    cases: list[Case] = []
    for plain_case in planned.cases:
        cases += [case(plain_case.n_prompt, gen, setup, text) for setup, text in setups]
    return with_cases(planned, cases, write)


def prompt_sources(prompt: Texts | None) -> list[str]:
    """The kinds of text that `--prompt` names, each once; or a file. LabError for random tokens."""
    if prompt == prompts.RANDOM:
        raise LabError(
            "Random tokens cannot be predicted.",
            f"Give texts: --prompt {DEFAULT_TEXTS}, or a text file.",
        )
    if prompt == prompts.TEXT:
        return prompts.own_texts()
    names = parts(prompt or DEFAULT_TEXTS)
    if isinstance(prompt, str) and not set(names) <= set(prompts.own_texts()):
        return [prompt]
    return list(dict.fromkeys(names))


def check_longest(n_draft: int, n_gen: int, settings: Settings) -> None:
    """LabError if drafts of this length do not fit into a step, or into the answer."""
    n_step = min(settings.n_ubatch, settings.n_batch)
    if n_draft >= n_step:
        raise LabError(
            f"{n_draft:,} drafted tokens and the token before them do not fit into one step of "
            f"{plural(n_step, 'token')}.",
            f"Use a --draft-len of at most {n_step - 1:,}, or a larger --ubatch.",
        )
    if n_draft > n_gen - 2:
        raise LabError(
            f"--gen {n_gen:,} is too short for drafts of {plural(n_draft, 'token')}.",
            f"Use --gen {n_draft + 2:,} or more; at least 64 gives useful results.",
        )


def check_draft(draft: Draft, planned: Plan, worker: Worker) -> None:
    """LabError if a model cannot draft for the plan's model."""
    need_every_position(draft.model)
    difference = worker.vocabularies_differ(planned.file.path, draft.file.path)
    if draft.file.source == catalog.SYNTHETIC:
        difference = difference or "the draft has random weights"
    if difference:
        models = f"{label_of(draft.model)} and {label_of(planned.model)}"
        raise LabError(
            f"The vocabularies of {models} differ: {difference}.",
            "Use a smaller model of the same family, or a smaller quantization.",
        )


def label_of(model: Model) -> str:
    return f"{model.name} {model.quantization or ''}".strip()


def case(n_prompt: int, n_gen: int, speculation: Speculation, text: str) -> Case:
    return Case(
        n_prompt,
        n_gen,
        experiment=NAME,
        setup=speculation,
        sequences=(n_prompt + n_gen + speculation.n_draft + N_IN_A_ROW,),
        text=text,
    )


def write(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script: a prompt, then plain decoding or drafts; or, without a text, single steps."""
    speculation = case.setup
    assert isinstance(speculation, Speculation)
    if speculation.text is None:
        return single_steps(case, speculation, text, settings)
    has_model = has_draft_model(speculation)
    operations = read_prompt(text(0, case.n_prompt), settings, has_model, is_last=True)
    n_more = case.n_gen - 1
    if speculation.n_draft == 0:
        return [*operations, *script.decode([0], n_more)]
    drafts = Operation(
        OPEN_ENDED, times=n_more, n_draft=speculation.n_draft, of_draft=has_model, by=CHILD
    )
    return [*operations, drafts]


def has_draft_model(speculation: Speculation) -> bool:
    return speculation.draft not in (None, LOOKUP)


def read_prompt(
    ids: Sequence[int], settings: Settings, has_draft_model: bool, is_last: bool
) -> list[Operation]:
    """Prefill the prompt; before that in the draft model, if there is one."""
    operations: list[Operation] = []
    if has_draft_model:
        for step in script.prefill(0, ids, settings.n_ubatch, is_last=False):
            operations.append(dataclasses.replace(step, kind=DRAFT, of_draft=True))
    return operations + script.prefill(0, ids, settings.n_ubatch, is_last=is_last)


def single_steps(
    case: Case, speculation: Speculation, text: Text, settings: Settings
) -> list[Operation]:
    """The script of the curve: steps of several sizes in random order, each forgotten again."""
    n_past = case.n_prompt + case.n_gen // 2
    n_most = speculation.n_draft + 1
    ids = text(0, n_past + max(n_most, N_IN_A_ROW))
    has_model = has_draft_model(speculation)
    sizes = [(n, False) for n in range(1, n_most + 1)]
    if has_model:
        sizes += [(1, True), (2, True)]
    operations = read_prompt(ids[:n_past], settings, has_model, is_last=False)
    chance = random.Random(f"{settings.seed} {ids[-1]}")
    for _ in range(N_TIMES):
        for n, is_of_draft in chance.sample(sizes, len(sizes)):
            operations += measured_step(ids, n_past, n, is_of_draft)
    return operations


def measured_step(
    ids: Sequence[int], n_past: int, n: int, is_of_draft: bool
) -> list[Operation]:
    """A step of n positions (of one: several in a row), and forgetting it."""
    if is_of_draft:
        kind = DRAFT
    elif n == 1:
        kind = DECODE
    else:
        kind = VERIFY
    n_outputs = 1 if is_of_draft else n
    n_steps = N_IN_A_ROW if n == 1 else 1
    operations: list[Operation] = []
    for first in range(n_past, n_past + n_steps):
        part = Part(0, tuple(ids[first : first + n]), n_outputs)
        operations.append(Operation(kind, (part,), of_draft=is_of_draft))
    operations.append(Operation(FORGET, first=n_past, of_draft=is_of_draft))
    return operations
