"""`lab speculate`: draft n tokens, verify them in one step. Does it pay?

A step of n + 1 positions reads the weights once, like a step of one. If n tokens are drafted, the model verifies them
all in one step and keeps those that it would have chosen. The text stays the same; the speed depends on three figures:

- L, tokens per step: how many drafted tokens are accepted
- c, the cost of a drafted token: a step of the draft model over a step of the model (0 for lookup in the text)
- v(n), the cost of verifying: a step of n + 1 positions over a step of one. If memory traffic is the limit, v is about
  1; if arithmetic is, as on most CPUs, v is larger

Speed-up = L / (n c + v(n)). The curve v(n) and c are measured in separate steps, which are forgotten again. Acceptance
comes from the runs with the longest drafts. The speed-up of every other draft length is predicted from these.
Leviathan et al. (2023) assume v = 1.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from lab.cli.options import TOKENS
from lab.core import script, stats
from lab.core.lists import grouped
from lab.core.payloads import LOOKUP, Speculation
from lab.core.record import DECODE, DRAFT, FORGET, VERIFY, Record, Run, Settings
from lab.core.script import SPECULATE, Operation, Part
from lab.errors import LabError
from lab.features.experiment import (
    Experiment,
    Keywords,
    Option,
    Table,
    cell,
    for_plan,
    listed,
    need_every_position,
    numbers,
    public,
)
from lab.features.speculate import rows as speculation_rows
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.runner import prompts
from lab.runner.cases import Case, Draft, Plan, Text
from lab.runner.plan import make_plan, parse_lengths, read_header, with_cases
from lab.show import canvas, disturbances
from lab.show.wording import digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_TEXTS = "code,table,story,dialogue"
N_TIMES = 5
"""Measurements of each step of the curve in a run."""

N_IN_A_ROW = 4


def plan(
    worker: Worker,
    /,
    draft: str | None = None,
    draft_len: str | int | Sequence[int] = "1,2,4,8",
    prompt_len: str | int | Sequence[int] = "256",
    gen: int = 128,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    **settings: Unpack[Keywords],
) -> Plan:
    """Generate with and without drafted tokens, in blocks; returns a record per run.

        lab.speculate("lookup", "2,4", gen=64)

    `draft` is "lookup" (the default: what followed the same words earlier in the text) or a model: a smaller one with
    the same vocabulary, or the same one in a smaller quantization. A block is a fresh engine, a text of each kind
    (`prompt`, by default code, table, story and dialogue), and every draft length and no drafts in random order. For a
    model with random weights only the times of steps are measured. LabError for impossible values.
    """
    given = for_plan(settings)
    prompt: str | None = given.pop("prompt", None)
    is_random = catalog.parse(model).source == catalog.SYNTHETIC
    if is_random and (draft is not None or prompt not in (None, prompts.RANDOM)):
        what = f"{model} has random weights, so the acceptance of drafts says nothing."
        raise LabError(what, "Leave --draft and --prompt out: then only steps are timed.")
    if prompt == prompts.RANDOM and not is_random:
        raise LabError("Random tokens cannot be predicted.", f"Give texts: --prompt {DEFAULT_TEXTS}, or a text file.")
    texts = list(dict.fromkeys(name.strip() for name in (prompt or DEFAULT_TEXTS).split(",")))
    if is_random:
        texts = [prompts.RANDOM]
    elif prompt == prompts.TEXT:
        texts = prompts.own_texts()
    elif prompt and not set(texts) <= set(prompts.own_texts()):
        texts = [prompt]  # a file
    repeat = stats.fewest_for_interval() if repeat is None else repeat
    made = make_plan(worker, prompt_len, gen, repeat, model, prompt=",".join(texts), **given)
    lengths = numbers("--draft-len", parse_lengths(draft_len, "--draft-len"), 2**20)
    longest, most = lengths[-1], min(made.settings.n_ubatch, made.settings.n_batch) - 1
    if longest > most:
        raise LabError(
            f"{longest:,} drafted tokens and the token before them do not fit into one step of {most + 1:,} tokens.",
            f"Use a --draft-len of at most {most:,}, or a larger --ubatch.",
        )
    if longest > gen - 2:
        raise LabError(
            f"--gen {gen:,} is too short for drafts of {longest:,} tokens.",
            f"Use --gen {longest + 2:,} or more; at least 64 gives useful results.",
        )
    need_every_position(made.model)
    label = None if is_random else LOOKUP
    if draft not in (None, LOOKUP):
        file = obtain.obtain(catalog.parse(str(draft)), worker, given.get("watch", obtain.silently))
        drafting = read_header(worker, file)
        need_every_position(drafting)
        label = f"{drafting.name} {drafting.quantization or ''}".strip()
        differ = worker.vocabularies_differ(made.file.path, file.path)
        if differ or file.source == catalog.SYNTHETIC:
            model_label = f"{made.model.name} {made.model.quantization or ''}".strip()
            raise LabError(
                f"The vocabularies of {label} and {model_label} differ: {differ or 'the draft has random weights'}.",
                "Use a smaller model of the same family, or a smaller quantization.",
            )
        made = dataclasses.replace(made, draft=Draft(file, drafting))
    levers = [(Speculation(label, longest, None), texts[0])]
    for text in [] if is_random else texts:
        name = prompts.source(text).name
        levers += [(Speculation(label if n else None, n, name), text) for n in (0, *lengths)]
    cases = [
        Case(n_prompt, gen, lever=lever, sequences=(n_prompt + gen + lever.n_draft + N_IN_A_ROW,), text=text)
        for n_prompt in (case.n_prompt for case in made.cases)
        for lever, text in levers
    ]
    return with_cases(made, cases, write)


def write(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script: a prompt, then plain decoding, drafts, or (without a text) the steps of the curve."""
    lever = case.lever
    assert isinstance(lever, Speculation)
    is_of_draft = lever.draft not in (None, LOOKUP)
    if lever.text is None:
        return _curve(case, lever.n_draft, is_of_draft, text, settings)
    prompt = text(0, case.n_prompt)
    operations = script.prefill(0, prompt, settings.n_ubatch)
    if not lever.n_draft:
        return [*operations, *script.decode([0], case.n_gen - 1)]
    by = "lab.features.speculate.child"
    guess = Operation(SPECULATE, times=case.n_gen - 1, n_draft=lever.n_draft, of_draft=is_of_draft, by=by)
    return [*(script.read_by_draft(prompt, settings.n_ubatch) if is_of_draft else []), *operations, guess]


def _curve(case: Case, n_most: int, is_of_draft: bool, text: Text, settings: Settings) -> list[Operation]:
    """Steps of 1 to n_most + 1 positions in the middle of the answers, each forgotten; and of 1 and 2 on the draft.

    A step of one is repeated N_IN_A_ROW times, as in an answer: directly after a large step it takes longer.
    """
    n_past = case.n_prompt + case.n_gen // 2
    ids = text(0, n_past + max(n_most + 1, N_IN_A_ROW))
    operations = script.prefill(0, ids[:n_past], settings.n_ubatch, is_last=False)
    wanted = [(n, False) for n in range(1, n_most + 2)]
    if is_of_draft:
        operations = [*script.read_by_draft(ids[:n_past], settings.n_ubatch), *operations]
        wanted += [(1, True), (2, True)]
    chance = random.Random(f"{settings.seed} {ids[-1]}")
    for n, on_draft in [step for _ in range(N_TIMES) for step in chance.sample(wanted, len(wanted))]:
        kind = DRAFT if on_draft else VERIFY if n > 1 else DECODE
        for i in range(N_IN_A_ROW if n == 1 else 1):
            part = Part(0, tuple(ids[n_past + i : n_past + i + n]), 1 if on_draft else n)
            operations.append(Operation(kind, (part,), of_draft=on_draft))
        operations.append(Operation(FORGET, first=n_past, of_draft=on_draft))
    return operations


def _again(runs: Sequence[Run]) -> dict[str, object]:
    levers = [run.speculation for run in runs if run.speculation]
    return {
        "draft": next((catalog.spec_of(run.draft) for run in runs if run.draft), None),
        "draft_len": listed(lever.n_draft or None for lever in levers),
        "prompt_len": listed(run.n_prompt for run in runs),
        "gen": runs[0].n_gen,
    }


MOST_PANELS = 8


def draw(rows: Sequence[Any], records: Sequence[Record], subject: str, figure: Figure) -> None:
    """The speed-up over the draft length, a panel for each text."""
    runs = speculation_rows.of_runs(records).dropna(subset="plain_s")
    panels = list(grouped(rows, lambda row: row[:3]).items())[:MOST_PANELS]
    axes = canvas.grid(figure, len(panels), min(len(panels), 4), sharex=True, sharey=True)
    drafts = list(dict.fromkeys(row.draft for row in rows))
    styles = dict(zip(drafts, canvas.styles(len(drafts)), strict=True))
    for ax, (key, in_panel) in zip(axes, panels, strict=True):
        for draft, own in grouped(in_panel, lambda row: row.draft).items():
            name, style = f"drafted by {draft}", styles[draft]
            colour, medians = style["color"], [(row.n_draft, row.speed_up) for row in own if row.speed_up is not None]
            line = {"color": colour, "lw": 2, "marker": "_", "ms": 14, "label": f"{name}: median"}
            ax.plot([n for n, _ in medians], [gain for _, gain in medians], **line)
            blocks = runs[(runs[speculation_rows.CASE[:4]] == [*key, draft]).all(axis=1) & (runs.n_draft > 0)]
            if len(blocks):
                pairs = zip(blocks.record, blocks.plain, strict=True)
                disturbed = [any(map(disturbances.disturbances, pair)) for pair in pairs]
                gains, label = list(blocks.plain_s / blocks.tpot_s), f"{name}: blocks"
                canvas.points(ax, list(blocks.n_draft), gains, disturbed, **style, ms=5, alpha=0.6, label=label)
            if expected := [(row.n_draft, row.expected) for row in own if row.expected is not None]:
                label = f"{name}: predicted"
                ax.plot(*zip(*expected, strict=True), color=colour, ls="--", lw=1.4, marker="x", ms=5, label=label)
        ax.axhline(1, color=canvas.GUIDE, ls=":", lw=1.2, label="plain decoding")
        ax.set_xticks(sorted({row.n_draft for row in rows}))
        ax.margins(x=0.1)
        ax.set_title(f"{key[0]}, {key[1]:,} + {key[2]:,} tokens", fontsize=10)
        ax.set_xlabel("drafted tokens per step")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("speed-up over plain decoding")
    canvas.finish(axes, f"Speculative decoding\n{subject}", is_apart=True)


TABLE = Table(
    name="speculate",
    question="Does it pay to draft tokens, and how many?",
    title="tokens drafted and verified together; medians over blocks, the speed-up's 95 % interval below",
    caption="Speed-up over plain decoding, over the number of drafted tokens per step; a panel for each text. Points "
    "are blocks, the line is the median, dashes are predictions.",
    columns=(
        ("text", lambda row: row.text),
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
        ("draft\nby", lambda row: row.draft),
        ("drafted\na step", lambda row: f"{row.n_draft}"),
        ("accepted\n%", lambda row: "-" if row.right is None else f"{100 * row.right:.0f}"),
        ("tokens\na step", lambda row: cell(row.length)),
        ("TPOT\nms", lambda row: cell(row.tpot_s, 1e3)),
        ("plain\nms", lambda row: cell(row.plain_tpot_s, 1e3)),
        (
            "speed-up",
            lambda row: cell(row.speed_up) + ("" if row.low is None else f"\n{digits(row.low)}-{digits(row.high)}"),
        ),
        ("predicted", lambda row: cell(row.expected)),
    ),
    rows=speculation_rows.rows,
    conclude=speculation_rows.sentences,
    draw=draw,
    is_by_ceilings=False,
)

CURVE = Table(
    name="curve",
    question="What does it cost to verify several tokens at once?",
    title="steps of several positions of one sequence; medians",
    columns=(
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
        ("positions\na step", lambda row: f"{row.n_positions}"),
        ("step\nms", lambda row: cell(row.step_s, 1e3)),
        ("v", lambda row: cell(row.v)),
        ("predicted\nv", lambda row: cell(row.expected_v)),
        ("c", lambda row: cell(row.c)),
    ),
    rows=speculation_rows.curve,
    conclude=lambda rows, _: speculation_rows.of_curve(rows),
)

EXPERIMENT = Experiment(
    name="speculate",
    chapter="Speculative decoding",
    about="""Measure what speculative decoding costs and gains.

    \b
      lab speculate --draft lookup --draft-len 1-8
      lab speculate --draft smollm2-135m:Q4_0 --prompt code,story

    Generates with and without drafts, in blocks. For each kind of text the command shows how many drafted tokens are
    accepted, what verification costs, the speed-up over plain decoding with its interval, the prediction from the
    times of single steps, and the bottleneck if it does not pay. The tokens match plain decoding except at near-ties,
    which are counted. With random weights only the steps are timed.
    """,
    lever=Speculation,
    plan=plan,
    options=(
        Option(
            "draft",
            "Where drafts come from: lookup (what followed the same words before) or a model.  [default: lookup]",
            metavar="lookup|SPEC",
        ),
        Option("draft_len", "Lengths of the draft in tokens: 1,2,4 or 1-8.", "l"),
        Option("prompt_len", "Prompt tokens.", "p"),
        Option("gen", "Tokens to generate.", "n", type=TOKENS),
        Option("repeat", "Blocks, each with a fresh engine and other prompts.  [default: 6]", "r", type=int),
        Option("prompt", "Kinds of text, or a text file.  [default: code,table,story,dialogue]", metavar="TEXT"),
    ),
    again=_again,
    tables=(TABLE, CURVE),
)

command, KINDS = EXPERIMENT.as_command(), (EXPERIMENT.as_kind(),)
speculate = public("speculate", plan)
