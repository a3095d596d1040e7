"""Explains the time of runs from the best rates of the machine's own kernels, and predicts what would help.

A phase's least time is the sum of its kernels at their ceilings. Measured time beyond that is overhead (norms, softmax,
threads that wait for each other, small matrices that do not fill a core). Below are the two classical roofs: arithmetic
(FLOPs over the machine's best FLOP/s) and memory traffic (bytes over its best bytes/s). The nearest of the three is the
limit; attention is one if it takes longer than all products. Williams, Waterman & Patterson, "Roofline" (2009).

`levers` predicts changes of settings: it replaces one part of a phase by another with a known ceiling and keeps
everything else as measured. `experiments` predicts gains from the times of steps that the runs do not have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.core import cost, phases, shape, shell, shown, stats
from lab.core.lists import join_and, plural
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Rate, Record, Run, Settings
from lab.core.shape import BLOCKS, EXPERTS, FEED_FORWARD
from lab.errors import LabError
from lab.roofline import probing, step_kernels
from lab.roofline.probing import used_types
from lab.roofline.step_kernels import Roof, roof
from lab.roofline.learning import taught_by
from lab.core import guesses
from lab.models import catalog, synthetic
from lab.process.wire import (
    ATTENTION as FLASH,
    DOWNLOAD,
    MUL_MAT,
    MUL_MAT_ID,
    PLAIN_ATTENTION,
    UPLOAD,
)
from lab.runner.as_options import options
from lab.show import canvas, disturbances
from lab.show.canvas import COLOURS, INK, MARKERS
from lab.show.section import MOST_LINES, UNKNOWN, Columns, Picture, Section, tabled
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ARITHMETIC = "arithmetic"
TRAFFIC = "memory traffic"
KERNEL = "the kernel"
OVERHEAD = "overhead"
LAYERS = "layers"
ATTENTION = "attention"
OUTPUT = "output"
BETWEEN = "between devices"  # parts; attention limits too

OVERHEAD_SHARE = 0.5  # overhead limits a phase with more than this share outside its kernels
ATTENTION_SHARE = 0.5  # attention limits a phase with more than this share of its kernels' time
KERNEL_FACTOR = 1.5  # the kernel limits a phase if it is slower than arithmetic and memory traffic by this factor
BEYOND = 1.005  # a phase above this share of its ceiling shows that the ceiling is wrong, and so are its parts
CASE = ["n_prompt", "n_gen", "phase"]

Step = tuple[cost.StepCost, step_kernels.Parts]


def explain(records: Sequence[Record], ceilings: Ceilings) -> pd.DataFrame:
    """The cost, rates and limit of every length and phase of one setup's runs: a row each, medians over runs.

        rows = lab.explain(records, lab.ceilings())

    Times of decode are per token. `least_s` is what its kernels take at their ceilings; `parts` has it by part (and
    device). `of_request` is the phase's share of the whole request; `choosing_s` (sampling) and `harness_s` (from one
    step to the next) are not in measured_s. LabError if there is nothing to explain, or a ceiling is missing.
    """
    import pandas as pd

    known = dict[Any, Step]()
    runs = [
        (run, record)
        for record in records
        if not record.run.lever
        for run in phases.by_length(record.run)
    ]
    runs = [(run, record) for run, record in runs if run.is_timed]
    both = [
        (run, record, phase)
        for run, record in runs
        for phase in (PREFILL, DECODE)
        if phase in run.steps.kind
    ]
    if not both:
        hint = "What there is, with predictions of experiments: lab show RESULTS"
        raise LabError("There is no run of lab measure with steps to explain.", hint)
    of_runs = pd.DataFrame(
        _phase(phase, run, record, ceilings, known) for run, record, phase in both
    )
    cases = of_runs.groupby(CASE)
    t = (
        of_runs.drop_duplicates(CASE).set_index(CASE).sort_index(ascending=[True, True, False])
    )  # prefill first
    for name in ("measured_s", "choosing_s", "harness_s", "of_request"):
        t[name] = cases[name].median()
    t["n_runs"] = cases.size()
    t["n_disturbed"] = cases.is_disturbed.sum()
    t["intensity"] = t.flops / t.n_bytes
    t["of_ceiling"] = t.least_s / t.measured_s
    t["gflops"] = t.flops / t.measured_s / 1e9
    t["gbps"] = t.n_bytes / t.measured_s / 1e9
    t["limit"] = [limit_of(row) for row in t.itertuples()]
    of_ceilings = probing.doubts(ceilings)
    fewest = stats.fewest_for_interval()
    above = [(shown.ABOVE,) if is_above else () for is_above in t.least_s > BEYOND * t.measured_s]
    t["doubts"] = [
        shown.all_of([shown.of_runs(n, n_disturbed, fewest), of_ceilings, one])
        for n, n_disturbed, one in zip(t.n_runs, t.n_disturbed, above, strict=True)
    ]
    return t.reset_index().drop(columns=["is_disturbed", "n_disturbed"])


def _phase(
    phase: str, run: Run, record: Record, ceilings: Ceilings, known: dict[Any, Step]
) -> dict[str, Any]:
    """A phase of one run (decode: the mean per token); `known` are the steps of other runs. LabError without a cost."""
    model = record.model
    settings = record.settings
    steps = run.steps
    last = phases.n_prefill_steps(run) - 1
    layers = probing.layers_of(record)
    chosen = [i for i, kind in enumerate(steps.kind) if (kind == PREFILL) == (phase == PREFILL)]
    sizes = [(steps.n_tokens[i], steps.n_past[i], 1 if i >= last else 0) for i in chosen]
    for size in sizes:
        if (size, layers) not in known:
            step = step_kernels.step_cost(model, *size, settings.type_k, settings.type_v)
            known[size, layers] = (
                step,
                step_kernels.parts(model, settings, ceilings, *size, layers=layers),
            )
    costs, parts = zip(*(known[size, layers] for size in sizes), strict=True)
    n = len(chosen) if phase == DECODE else 1
    is_split = len(parts[0].by_device) > 1
    best = roof(ceilings, layers)
    by_part = dict[str, float]()
    for name in parts[0].by_device:
        sums = [
            sum(times) / n for times in zip(*(step.by_device[name] for step in parts), strict=True)
        ]
        first = f"{name or probing.CPU} " if is_split else ""
        by_part |= {
            f"{first}{LAYERS}": sums[0],
            f"{first}{ATTENTION}": sums[2],
            f"{first}{OUTPUT}": sums[1],
        }
    if is_split:
        by_part[BETWEEN] = sum(step.between_s for step in parts) / n
    prefill = phases.prefill_ns(run)
    e2e = phases.e2e_ns(run)
    of_prefill = prefill / e2e if prefill and e2e else 0.0
    flops, n_bytes = (
        sum(getattr(step, name) for step in costs) / n for name in ("flops", "n_bytes")
    )
    return {
        "n_prompt": run.n_prompt,
        "n_gen": run.n_gen,
        "phase": phase,
        "n_steps": len(chosen),
        "measured_s": sum(steps.ready_ns[i] - steps.start_ns[i] for i in chosen) / 1e9 / n,
        "least_s": sum(step.total.total_s for step in parts) / n,
        "parts": by_part,
        "is_split": is_split,
        "flops": flops,
        "n_bytes": n_bytes,
        "arithmetic_s": flops / best.gflops / 1e9,
        "traffic_s": n_bytes / best.gbps / 1e9,
        "choosing_s": sum(steps.end_ns[i] - steps.ready_ns[i] for i in chosen) / 1e9 / n,
        "harness_s": sum(steps.start_ns[i] - steps.end_ns[i - 1] for i in chosen if i) / 1e9 / n,
        "of_request": of_prefill if phase == PREFILL else 1 - of_prefill,
        "is_disturbed": bool(disturbances.disturbances(record)),
    }


def limit_of(row: Any) -> str:
    """What is nearest to the measured time."""
    attention_s = sum(part for name, part in row.parts.items() if name.endswith(ATTENTION))
    if row.measured_s - row.least_s > OVERHEAD_SHARE * row.measured_s:
        return OVERHEAD
    if attention_s > ATTENTION_SHARE * row.least_s:
        return ATTENTION
    if row.least_s > KERNEL_FACTOR * max(row.arithmetic_s, row.traffic_s):
        return KERNEL
    return ARITHMETIC if row.arithmetic_s > row.traffic_s else TRAFFIC


# Advice

LEAST_GAIN = 1.05
MOST_LEVERS = 3
IN_LAYERS = (shape.ATTENTION, FEED_FORWARD, EXPERTS)
SEQUENCES = (2, 4, 8, 16)
DRAFT_LENGTHS = range(1, 9)
NEW = 64  # most tokens of a new message after the cached ones
ANSWER = 2  # tokens of an answer in the command: the fewest of `lab turns`
ACCEPTANCE = 0.8  # the acceptance for which a speed-up is predicted
FEW = 5  # the most lengths that a picture or a sentence names each
FIRST = (
    MOST_LINES - 1
)  # verdicts of an explanation on a terminal, before the first advice; --details shows all

LEFT_OUT = {
    "turns": [("--kv-unified", "on")],
    "speculate": [("--kv-unified", "on"), ("--prompt", "random")],
}
"""Options that commands do not get: they have one sequence, and speculation uses the lab's texts, not random tokens."""


class Advice(NamedTuple):
    """What is predicted to be faster: in words, with its figures, and the command that tries it, if there is one."""

    words: str
    command: str | None
    figures: dict[str, Any]


Change = tuple[str, Model, Settings, tuple[str, object, object] | None]
"""A change to judge: in words, the model and the settings with it, and its option with the old and the new value."""


def levers(rows: pd.DataFrame, record: Record, ceilings: Ceilings) -> list[Advice]:
    """The three changes with the largest gains, for one setup's explained rows; disturbed rows predict nothing."""
    rows = rows[rows.doubts.map(shown.may_promise)]
    found = list[tuple[float, Advice]]()
    said = {PREFILL: "prefill of {:,} tokens", DECODE: "decode after {:,} tokens"}
    for words, model, settings, changed in _changes(rows, record, ceilings):
        gains: dict[str, tuple[float, int]] = {}
        try:
            for row in rows.itertuples():
                n_tokens = min(settings.n_ubatch, row.n_prompt)
                step = (
                    (n_tokens, (row.n_prompt - n_tokens) // 2, 1)
                    if row.phase == PREFILL
                    else (1, row.n_prompt, 1)
                )
                old_s = step_kernels.total(record.model, record.settings, ceilings, *step).total_s
                new_s = step_kernels.total(model, settings, ceilings, *step).total_s
                rest = max(0.0, row.measured_s - row.least_s)
                gain = row.measured_s / (rest + (row.measured_s - rest) * new_s / old_s)
                gains[row.phase] = max(gains.get(row.phase, (0.0, 0)), (gain, int(row.n_prompt)))
        except LabError:  # a ceiling is missing
            continue
        best, _ = max(gains.values())
        if best < LEAST_GAIN:
            continue
        command = None
        if changed:
            name, *both = changed
            replaced = {name, *(["--threads-batch"] if name == "--threads" else [])}
            shared = [
                word for option in options(record) if option[0] not in replaced for word in option
            ]
            lengths = ",".join(map(str, sorted({n_prompt for _, n_prompt in gains.values()})))
            old, new = ([name, value] for value in both)
            command = shell.lab(
                "ab", old, new, "--prompt-len", lengths, "--gen", str(rows.n_gen.max()), *shared
            )
        figures: dict[str, Any] = {"change": words}
        for phase in said:
            figures[f"{phase}_gain"], figures[f"{phase}_at"] = gains.get(phase, (None, None))
        figures["command"] = command
        faster = [
            f"{said[one].format(at)} is {digits(gain)}x as fast"
            for one, (gain, at) in gains.items()
        ]
        found.append((best, Advice(f"{words}: {', '.join(faster)}", command, figures)))
    return [advice for _, advice in sorted(found, key=lambda one: -one[0])][:MOST_LEVERS]


def _changes(rows: pd.DataFrame, record: Record, ceilings: Ceilings) -> Iterator[Change]:
    """Weights of other types, other threads, and flash attention on or off: whatever was probed."""
    model = record.model
    settings = record.settings
    known = shape.matrices(model)
    if known is None or rows.empty:
        return
    main = used_types(model)[0]
    ops = {
        MUL_MAT_ID if matrix.part == EXPERTS else MUL_MAT for matrix in known if matrix.type == main
    }
    sizes = {(matrix.rows, matrix.columns) for matrix in known if matrix.part in IN_LAYERS}
    probed = [one for one in ceilings.rates if one.op in ops and (one.rows, one.columns) in sizes]
    kinds = {one.type for one in probed if ceilings.on_gpu or one.n_threads == settings.n_threads}
    for kind in sorted((kinds - {main}) & BLOCKS.keys()):
        moved = [
            m
            for m in known
            if m.type == main and m.part in IN_LAYERS and m.columns % BLOCKS[kind][0] == 0
        ]
        packed = [
            dataclasses.replace(m, type=kind) for m in moved
        ]  # embedding and output matrix keep their type
        n_bytes = {kind: 0.0, **model.tensor_bytes}
        n_bytes[main] -= sum(m.n_bytes for m in moved)
        n_bytes[kind] += sum(m.n_bytes for m in packed)
        by_type = {one: round(n) for one, n in n_bytes.items() if round(n)}
        matrices = *(m for m in known if m not in moved), *packed
        other = dataclasses.replace(model, tensor_bytes=by_type, matrices=matrices)
        can_make = kind in synthetic.QUANTIZATIONS and model.source != "file"
        specs = (
            ("--model", catalog.spec_of(model), catalog.spec_of(model, kind)) if can_make else None
        )
        yield f"{kind} instead of {main}", other, settings, specs
    for n in sorted(
        {rate.n_threads for rate in ceilings.rates if not ceilings.on_gpu} - {settings.n_threads}
    ):
        fewer = dataclasses.replace(settings, n_threads=n, n_threads_batch=n)
        words = f"{plural(n, 'thread')} instead of {settings.n_threads}"
        yield words, model, fewer, ("--threads", settings.n_threads, n)
    if {FLASH, PLAIN_ATTENTION} <= {
        rate.op for rate in ceilings.rates if rate.type == settings.type_k.upper()
    }:
        now, new = ("off", "on") if settings.flash_attn_resolved == "off" else ("on", "off")
        switched = dataclasses.replace(settings, flash_attn=new, flash_attn_resolved=new)
        yield f"flash attention {new} instead of {now}", model, switched, ("--flash-attn", now, new)


def experiments(rows: pd.DataFrame, records: Sequence[Record], ceilings: Ceilings) -> list[Advice]:
    """The experiments with a predicted gain, for one setup's explained rows and their records."""
    plain = [record for record in records if record.run.lever is None]
    rows = rows[rows.doubts.map(shown.may_promise)]
    if not plain or rows.empty:
        return []
    record = plain[0]
    found = list[Advice]()
    model = record.model
    settings = record.settings
    prediction = taught_by(plain, record, ceilings)

    def offer(name: str, words: str, sizes: dict[str, Any], **figures: Any) -> None:
        shared = [option for option in options(record) if option not in LEFT_OUT.get(name, ())]
        command = shell.lab(
            name, *(word for option in [*sizes.items(), *shared] for word in option)
        )
        found.append(Advice(words, command, {**figures, "command": command, "experiment": name}))

    can_cut = not any(
        model.windows or ()
    )  # a cache of the last positions only cannot be copied and cut
    decode = rows[rows.phase == DECODE].sort_values(
        ["n_prompt", "n_gen"], ascending=[True, False], kind="stable"
    )
    one_s = None
    for shortest in decode.head(1).itertuples():  # the longest answer after the shortest prompt
        n_prompt = shortest.n_prompt
        n_gen = shortest.n_gen
        n_past = n_prompt + max(0, n_gen - 2) // 2
        asked = {"n_prompt": n_prompt, "n_gen": n_gen}
        lengths = {"--prompt-len": n_prompt, "--gen": n_gen}
        one_s = prediction.seconds(1, n_past, 1)
        n_best = 1
        best = 1.0
        for n in SEQUENCES:
            step_s = prediction.seconds(1, n_past, n, [(1, n_past)] * (n - 1))
            if (
                n <= settings.n_batch
                and one_s
                and step_s
                and n * one_s / step_s >= LEAST_GAIN * best
            ):
                n_best = n
                best = n * one_s / step_s
        if n_best > 1:
            words = (
                f"{n_best} sequences decoded together: {digits(best)}x the tokens/s in total, "
                f"{digits(best / n_best)}x per user, after prompts of {n_prompt:,} tokens"
            )
            figures = {"n_seq": n_best, "total_gain": best, "user_share": best / n_best, **asked}
            offer("batch", words, {"--sequences": f"1,{n_best}", **lengths}, **figures)
    trained = model.n_ctx_train or math.inf
    prefill = rows[
        (rows.phase == PREFILL) & (rows.n_prompt + ANSWER <= trained) & (rows.n_prompt >= 8)
    ]
    for longest in prefill.nlargest(1, "n_prompt").itertuples() if can_cut else ():
        n_new = min(NEW, longest.n_prompt // 4)  # the second turn of a conversation
        n_cached = longest.n_prompt - n_new
        ttft_s = longest.measured_s
        cached_s = prediction.prefill(n_cached, 0, 0)
        new_s = prediction.prefill(n_new, n_cached)
        if cached_s is None or new_s is None or (cached_s + new_s) / new_s < LEAST_GAIN:
            continue
        saved_s = ttft_s * cached_s / (cached_s + new_s)
        gain = ttft_s / (ttft_s - saved_s)
        words = (
            f"{n_cached:,} of {longest.n_prompt:,} prompt tokens cached from an earlier turn (all but {n_new}): the "
            f"first token comes {digits(gain)}x as fast (saves {seconds(saved_s)} of {seconds(ttft_s)})"
        )
        figures = {
            "n_cached": n_cached,
            "n_new": n_new,
            "ttft_s": ttft_s,
            "saved_s": saved_s,
            "gain": gain,
        }
        sizes = {"--system": n_cached - n_new - ANSWER, "--turn": f"{n_new}+{ANSWER}", "--turns": 2}
        offer("turns", words, sizes, **figures)
    if (
        not one_s or not can_cut or model.source == catalog.SYNTHETIC
    ):  # the text of random weights is noise
        return found
    drafts = [n for n in DRAFT_LENGTHS if n < settings.n_ubatch and n <= n_gen - 2]
    steps = {n: prediction.seconds(n + 1, n_past, n + 1) for n in drafts}
    costs = {n: step_s / one_s for n, step_s in steps.items() if step_s}
    gains = {n: guesses.textbook_length(ACCEPTANCE, n) / v for n, v in costs.items()}
    n_draft = max(gains, key=gains.__getitem__, default=0)
    if gains.get(n_draft, 0.0) >= LEAST_GAIN:
        least = guesses.break_even(costs[n_draft], 0.0, n_draft) or 0.0
        words = (
            f"speculative decoding that guesses {plural(n_draft, 'token')} at a time: faster if more than "
            f"{100 * least:.0f} % of the guesses are right; at {100 * ACCEPTANCE:.0f} %, "
            f"{digits(gains[n_draft])}x as fast (without the time to draft)"
        )
        figures = {"n_draft": n_draft, "least_acceptance": least, "gain": gains[n_draft], **asked}
        offer(
            "speculate", words, {"--draft": "lookup", "--draft-len": n_draft, **lengths}, **figures
        )
    return found


def advice_of(one: Advice) -> str:
    """A sentence on a change: its predicted gain, and the command to try it."""
    return f"Predicted for {one.words}.{f' Try: {one.command}' if one.command else ''}"


# Words


def _shares(row: Any) -> str:
    if row.is_split or shown.ABOVE in row.doubts:  # of a GPU and the CPU a sentence has them
        return UNKNOWN
    parts = *row.parts.values(), max(0.0, row.measured_s - row.least_s)
    return "/".join(f"{100 * part / row.measured_s:.0f}" for part in parts)


EXPLAINED: Columns = (
    ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
    ("gen", lambda row: f"{row.n_gen:,}"),
    ("phase", lambda row: row.phase),
    ("measured\nms", lambda row: f"{digits(1e3 * row.measured_s)}{shown.mark(row.doubts)}"),
    ("limit", lambda row: row.limit if shown.is_firm(row.doubts) else "not sure"),
    (
        "% of\nceiling",
        lambda row: ">100" if shown.ABOVE in row.doubts else f"{100 * row.of_ceiling:.0f}",
    ),
    ("weights/attention/\noutput/rest %", _shares),
    ("GFLOP/s", lambda row: digits(row.gflops)),
    ("GB/s", lambda row: digits(row.gbps)),
    ("FLOPs\nper byte", lambda row: digits(row.intensity)),
)

LIMITS = {
    ARITHMETIC: "Arithmetic limits",
    TRAFFIC: "Memory traffic limits",
    ATTENTION: "Attention (--flash-attn {flash}, --cache-type-k {k}, --cache-type-v {v}) limits",
    KERNEL: "llama.cpp's kernel for this quantization (this machine is faster with others) limits",
    OVERHEAD: "Overhead (time outside the large kernels) limits",
}
TOO_LOW = "the ceiling was measured too low; measure again: lab ceilings --again"


def of_ceilings(ceilings: Ceilings) -> Section:
    """The kernels' best rates, and the ridge of the roofline."""

    def size(rate: Rate) -> str:
        if rate.op in (FLASH, PLAIN_ATTENTION):
            return f"{rate.rows} heads of {rate.columns}" + (
                f" over {rate.n_positions:,}" if rate.n_positions else ""
            )
        if rate.op in (UPLOAD, DOWNLOAD):
            return f"{rate.n_bytes:,} bytes"
        experts = f", {rate.n_expert_used} of {rate.n_expert}" if rate.n_expert else ""
        return UNKNOWN if rate.op == probing.READ else f"{rate.rows} x {rate.columns}{experts}"

    columns: Columns = (
        ("kernel", lambda rate: rate.op),
        ("type", lambda rate: rate.type),
        ("shape", size),
        ("buffer", lambda rate: rate.buffer),
        ("tokens", lambda rate: str(rate.n_tokens)),
        ("threads", lambda rate: UNKNOWN if ceilings.on_gpu else str(rate.n_threads)),
        ("GB/s", lambda rate: digits(probing.gbps(rate))),
        ("GFLOP/s", lambda rate: digits(probing.gflops(rate)) if rate.flops else UNKNOWN),
    )

    best = roof(ceilings)
    sizes = ("rows", "columns", "n_tokens", "n_positions")
    rates = sorted(
        ceilings.rates,
        key=lambda rate: (
            rate.op,
            rate.type,
            -rate.n_threads,
            *(getattr(rate, name) or 0 for name in sizes),
        ),
    )
    return Section(
        f"Ceilings of {probing.device_label(ceilings.machine, ceilings.device)}, measured {ceilings.measured_at}",
        answer=f"Best: {digits(best.gbps)} GB/s and {digits(best.gflops)} GFLOP/s. Arithmetic limits work above "
        f"{digits(best.ridge)} FLOPs per byte (the ridge), memory traffic limits work below.",
        **tabled(columns, rates, keep_all=True),
        parts=[of_ceilings(other) for other in ceilings.others or ()],
    )


def explained(
    label: str, records: Sequence[Record], ceilings: Ceilings, has_advice: bool = True
) -> Section:
    """Runs of one setup: the answer, each phase's time, limit and rates, sentences on limits, changes and parts."""
    rows = explain(records, ceilings)
    first = records[0]
    changes = levers(rows, first, ceilings) if has_advice else []
    tried = experiments(rows, records, ceilings) if has_advice else []
    best = roof(ceilings, probing.layers_of(first))
    lines = list(rows.itertuples())
    answer = ""
    if has_advice:
        answer = "What limits these runs cannot be told: they, or the ceilings, were disturbed."
        limits = rows[rows.doubts.map(shown.is_firm)].limit.value_counts()
        if len(limits):
            kind = first.model.quantization or "these"
            what = f"{limits.index[0]} limits the speed"
            if limits.index[0] == KERNEL:
                what = (
                    f"the largest part of the time goes to multiplying {kind} weights: llama.cpp's kernel (routine) "
                    f"for {kind} is slower than memory and arithmetic allow"
                )
            helps = [
                f"The change that helps most (predicted) is {one.words}."
                for one in (*changes, *tried)
            ]
            answer = f"In {limits.iloc[0]} of {len(rows)} rows {what}. {[*helps, 'No known change helps.'][0]}"
    verdict = verdicts(rows, first.settings)
    advised = [advice_of(one) for one in (*changes, *tried)]
    more = [
        *(where_it_went(row) for row in lines if row.is_split and shown.ABOVE not in row.doubts),
        f"The machine's best: {digits(best.gflops)} GFLOP/s and {digits(best.gbps)} GB/s. Below {digits(best.ridge)} "
        "FLOPs per byte (the ridge) memory sets the upper bound, above it arithmetic (ceilings of "
        f"{ceilings.measured_at}).",
    ]
    warnings = probing.doubt_words(ceilings)
    caption = (
        "Roofline: the rate of each phase (numbers: prompt tokens). The black line is the machine's best: memory "
        "limits on its slope, arithmetic on its flat part."
    )
    document: dict[str, Any] = {
        "setup": label,
        "roof": best._asdict(),
        "levers": [one.figures for one in changes],
        "experiments": [one.figures for one in tried],
        "ceilings_measured_at": ceilings.measured_at,
        "warnings": warnings,
        "rows": rows.to_dict("records"),
    }
    return Section(
        label,
        "ms: the whole prompt (prefill) or one token (decode), without choosing the next token; % of ceiling: 100 is "
        "as fast as this quantization's kernels alone, others may be faster; output: the last layer; rest: time beyond "
        "the kernels alone; GFLOP/s, GB/s: operations and bytes that the model needs at least / measured time",
        answer=answer,
        **tabled(EXPLAINED, lines, keep_all=True),
        warnings=warnings,
        sentences=[*verdict[:FIRST], *advised[:1], *verdict[FIRST:], *advised[1:], *more],
        pictures=[
            Picture(
                "roofline",
                caption,
                lambda on: plot_roofline(rows, best, label, on.subplots()),
                (5, 4.8),
            )
        ],
        data=lambda: document,
    )


def where_it_went(row: Any) -> str:
    """A sentence with the parts of a phase's time on several devices, in percent."""
    parts = {name: part for name, part in row.parts.items() if part or name == BETWEEN}
    parts["rest"] = max(0.0, row.measured_s - row.least_s)
    percents = ", ".join(
        f"{name} {100 * part / row.measured_s:.0f} %" for name, part in parts.items()
    )
    return f"{row.phase.capitalize()} at {row.n_prompt:,} prompt tokens: {percents}."


def verdicts(rows: pd.DataFrame, settings: Settings) -> list[str]:
    """Sentences on what limited the phases, with the share of the ceiling that each reached; one for each limit."""
    sentences = []
    now = {
        "flash": settings.flash_attn_resolved or settings.flash_attn,
        "k": settings.type_k,
        "v": settings.type_v,
    }
    for limit, alike in rows[rows.doubts.map(shown.is_firm)].groupby("limit", sort=False):
        reached = []
        for phase, own in alike.groupby("phase", sort=False):
            lengths = join_and([f"{n:,}" for n in sorted(set(own.n_prompt))])
            shares = join_and([f"{100 * share:.0f}" for share in own.of_ceiling])
            if len(own) > FEW:
                lengths = f"{own.n_prompt.iloc[0]:,} to {own.n_prompt.iloc[-1]:,}"
                shares = f"{100 * own.of_ceiling.min():.0f} to {100 * own.of_ceiling.max():.0f}"
            what = "prefill of" if phase == PREFILL else "decode after"
            reached.append(f"{what} {lengths} tokens ({shares} % of the ceiling)")
        sentences.append(f"{LIMITS[str(limit)].format(**now)} {' and '.join(reached)}.")
    disturbed = rows[rows.doubts.map(lambda doubts: shown.DISTURBED in doubts)]
    if len(disturbed):
        lengths = join_and([f"{n:,}" for n in sorted(set(disturbed.n_prompt))])
        sentences.append(
            f"No verdict on {' and '.join(disturbed.phase.unique())} at {lengths} prompt tokens: the runs were "
            "disturbed. Measure again while no other program runs."
        )
    if rows.doubts.map(lambda doubts: shown.ABOVE in doubts).any():
        sentences.append(
            f"A run was faster than its ceiling, so predicted gains are not sure: {TOO_LOW}."
        )
    return sentences


def plot_roofline(rows: pd.DataFrame, roof: Roof, subject: str, ax: Axes | None = None) -> Axes:
    """GFLOP/s over FLOPs per byte: each phase at each length as a point under the machine's two roofs.

    lab.plot_roofline(lab.explain(records, best), lesson.roof(best), "my machine")
    """
    ax = ax or canvas.new_axes()
    ends = min(1, rows.intensity.min()) / 2, max(roof.ridge, rows.intensity.max()) * 3
    ridge = [ends[0], roof.ridge, ends[1]]
    label = f"machine's best: {digits(roof.gbps)} GB/s, {digits(roof.gflops)} GFLOP/s"
    ax.plot(ridge, [min(roof.gbps * x, roof.gflops) for x in ridge], color=INK, lw=2, label=label)
    labels = list[tuple[float, float, str]]()
    marked = list[tuple[float, float]]()
    for number, (phase, own) in enumerate(rows.groupby("phase", sort=False)):
        style = {"color": COLOURS[number], "marker": MARKERS[number]}
        unsure = [not shown.is_firm(doubts) for doubts in own.doubts]
        canvas.points(
            ax, own.intensity.tolist(), own.gflops.tolist(), unsure, ms=7, **style, label=phase
        )
        ceilings = own.flops / own.least_s / 1e9
        bar: dict[str, Any] = {"ls": "", "marker": "_", "ms": 9, "mew": 2, "color": COLOURS[number]}
        ax.plot(own.intensity, ceilings, **bar, label=f"{phase}: ceiling of its kernels")
        named = own if len(own) <= FEW else own.iloc[[0, -1]]
        labels += [(row.intensity, row.gflops, f"{row.n_prompt:,}") for row in named.itertuples()]
        marked += [
            *zip(own.intensity, ceilings, strict=True),
            *zip(own.intensity, own.gflops, strict=True),
        ]
    ax.set(xscale="log", yscale="log")
    ax.set_ylim(bottom=ax.get_ylim()[0] / 1.5)  # for labels
    ax.set(
        xlabel="operations per byte read from memory (FLOPs per byte)",
        ylabel="rate of arithmetic (GFLOP/s)",
    )
    canvas.finish([ax], f"Roofline: the rate of each phase (numbers: prompt tokens)\n{subject}")
    canvas.label_points(ax, labels, marked)
    return ax
