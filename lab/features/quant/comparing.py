"""`lab quant`: how far the predictions of files of one model are from the first one's, and how fast they are.

Quality: every engine evaluates the same chunks of text, chunk after chunk. The reference writes its logits of a chunk
to a file, each candidate compares its own with them, and the next chunk overwrites them, so the file stays small. A
chunk has 512 tokens, and its second half is scored, as llama-perplexity does. For some chunks the reference is compared
with itself under other settings: what is below this noise floor cannot be told apart. Speed: blocks with fresh engines
that take turns, as in `lab ab`. Chunks are the replicates of quality, since tokens of one chunk are correlated; two
candidates saw the same chunks, so they are compared chunk by chunk.

Models that do not fit into memory together run one after the other. The reference then keeps of each position only its
largest logits and sums of the rest (about 3 MB a chunk), and the divergences are known within bounds.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from lab.app import experiment
from lab.app.experiment import Option
from lab.app.help import Command
from lab.app.options import (
    DURATION,
    ENGINE,
    OUTPUT,
    SEED,
    TOKENS,
    seconds_of,
    with_options,
)
from lab.app.output import Output
from lab.app.running import collect, introduce
from lab.core import cost, results, shown, stats
from lab.core.asked_settings import CACHE_TYPES, check_number
from lab.core.lists import grouped, join_and, plural
from lab.core.payloads import Divergence, Quality
from lab.core.record import QUANT, Record, Settings
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.runner import progress, prompts, trial as side_by_side
from lab.runner.cases import Plan, run_without_steps, utc_now
from lab.runner.progress import ShowStatus, Status
from lab.runner.session import new_results_file
from lab.show import canvas, comparison, text_results, text_setup
from lab.show.section import UNKNOWN, Columns, Kind, Picture, Section, tabled
from lab.show.wording import digits, percent, times

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

N_CHUNK = 512
FIRST = 256
MOST_CHUNKS = 1000  # tokens of a chunk, its first scored one (as llama-perplexity)
EMBEDDED = ("F16", "Q8_0", "Q4_K_M", "Q4_0", "Q3_K_M")  # of the embedded model, a Q4_1 itself
MIN_CHUNKS = 16
UNTIL = 0.05
N_FLOOR = 8
MOST_APART = 200
"""Chunks before the intervals may end the measurement, the half width that ends it, chunks of the noise floor, and the
most that are kept of a reference that runs alone (0.6 GB)."""

TEXTS = {
    "prose": ("manual", "story", "more/prose"),
    "code": ("code", "table", "more/code"),
    "dialogue": ("dialogue", "more/dialogue"),
    "other languages": ("german", "spanish"),
}
"""The lab's own texts by their kind; no prompt is cut from those in `more/`."""

Chunk = tuple[str, list[int]]  # the kind of text, and the tokens
CHILD = "lab.features.quant.child"
TEXT = "A text file, or the lab's own: code,dialogue.  [default: all]"
N_BLOCKS = 10
BUDGET = "10min"
FLOOR = "noise floor"


@dataclass(frozen=True)
class QuantPlan:
    """The plans by variant (the first is the reference), and the texts by kind. `apart`: one engine after the other."""

    plans: dict[str, Plan]
    texts: dict[str, str]
    text: str
    budget_s: float
    blocks: int
    apart: bool = False


def plan(
    worker: Worker,
    /,
    *files: str,
    cache_type: Annotated[
        str | Sequence[str], Option("Compare cache types of one file: f16,q8_0,q4_0.")
    ] = "",
    text: Annotated[str | None, Option(TEXT, metavar="TEXT")] = None,
    budget: Annotated[
        str | float, Option("Time to spend on quality, such as 2min or 1h.", type=DURATION)
    ] = BUDGET,
    blocks: Annotated[int, Option("Blocks for speed; each runs every file twice.")] = N_BLOCKS,
    prompt_len: Annotated[
        int, Option("Prompt tokens of the runs for speed.", "-p", type=TOKENS)
    ] = 256,
    gen: Annotated[int, Option("Tokens that these runs generate.", "-n", type=TOKENS)] = 32,
    **settings: Any,
) -> QuantPlan:
    """Compare files of one model with the first one, in quality and speed. Returns the records.

        records = lab.quant("model-F16.gguf", "model-Q8_0.gguf", "model-Q4_K_M.gguf")
        lab.quant_table(records)  # DataFrame, one row a file

    Without files: the embedded model, requantized. With `cache_type`: one file with these types of its cache. LabError
    for files that are not of one model, and for a text that is too short.
    """
    given = [
        one.strip()
        for one in (cache_type.split(",") if isinstance(cache_type, str) else cache_type)
    ]
    types = [one for one in given if one]
    if unknown := [one for one in types if one not in CACHE_TYPES]:
        raise LabError(
            f"{unknown[0]!r} is not a cache type.", f"Use some of {', '.join(CACHE_TYPES)}."
        )
    if types and len(files) > 1:
        raise LabError(f"--cache-type compares one file, and {len(files)} are named.", "Name one.")
    chosen = list(files) if types else [file for file, _ in expanded(files)]
    first, *more = compared = types or chosen
    if not more:
        example = (
            "--cache-type f16,q8_0,q4_0" if types else f"lab quant {first}:Q8_0 {first}:Q4_K_M"
        )
        hint = f"Name at least two, the reference first: {example}"
        raise LabError(f"There is nothing to compare {first} with.", hint)
    if len(set(compared)) < len(compared):
        raise LabError("A file or type is named twice.", "Name each once.")
    check_number("blocks", blocks, 1000)
    budget_s = seconds_of(budget)
    texts = {kind: prompts.own_text(names) for kind, names in TEXTS.items()}
    if text is not None:
        try:
            source = prompts.source(text)
        except LabError as problem:
            what = problem.what.replace("prompt file", "text")
            raise LabError(what, "Give a UTF-8 text, or leave --text out.") from None
        if source.text is None:
            raise LabError(
                "Random tokens say nothing about quality.", "Give a text, or leave --text out."
            )
        texts = {source.name: source.text}
    asked = {"prompt_len": [prompt_len], "gen": gen, **settings}
    variants: list[dict[str, Any]] = [{"model": one} for one in chosen]
    if types:
        asked["model"] = chosen[0] if chosen else catalog.DEFAULT
        variants = [{"cache_type_k": one, "cache_type_v": one} for one in types]
    plans = side_by_side.plan(
        worker, side_by_side.named(variants), blocks, may_be_apart=True, **asked
    )
    name, *others = plans
    for other in others:
        paths = plans[name].file.path, plans[other].file.path
        if paths[0] != paths[1] and (how := worker.vocabularies_differ(*paths)):
            raise LabError(
                f"{name} and {other} have different vocabularies: {how}.",
                "Compare files of one model.",
            )
    plans = {key: replace(one, part=QUANT) for key, one in plans.items()}
    return QuantPlan(
        plans, texts, text or "", budget_s, blocks, bool(side_by_side.too_large(plans))
    )


def carry_out(
    make: Callable[[Worker], QuantPlan], out: str | Path, watch: ShowStatus | None
) -> list[Record]:
    """Plan and measure."""
    with Worker() as worker:
        made = make(worker)
    path = new_results_file(next(iter(made.plans.values())), Path(out))
    with contextlib.nullcontext(watch) if watch else progress.in_notebook() as look:
        return list(execute(made, path, look))


quant = experiment.public("quant", plan, carry_out=carry_out)


def expanded(files: Sequence[str]) -> list[tuple[str, int]]:
    """The files to compare, with the bytes of those that a name of the catalog stands for (0 for others)."""
    if list(files) in ([], [catalog.DEFAULT]):
        return [(f"{catalog.DEFAULT}:{kind}", 0) for kind in EMBEDDED]
    if (
        len(files) == 1
        and (own := catalog.entries().get(files[0]))
        and own.repo
        and own.quantizations
    ):
        return [(f"hf:{own.repo}:{kind}", n_bytes) for kind, n_bytes in own.quantizations.items()]
    return [(file, 0) for file in files]


def missing(files: Sequence[str]) -> dict[str, int]:
    """What would have to be downloaded of the quantizations that a name of the catalog stands for: bytes by SPEC."""
    return {
        spec: n_bytes
        for spec, n_bytes in expanded(files)
        if n_bytes and not obtain.locate(catalog.parse(spec))
    }


def execute(made: QuantPlan, path: Path, watch: ShowStatus) -> Iterator[Record]:
    """Measure quality, then speed; yields each record after it is in `path`. After Ctrl-C whole chunks are kept."""
    name, *others = made.plans
    found: dict[str, list[Divergence]] = {one: [] for one in (*others, FLOOR)}
    own_settings = ((key, one.settings) for key, one in made.plans.items())
    settings = {
        key: replace(one, n_ctx=N_CHUNK, n_batch=max(one.n_batch, N_CHUNK))
        for key, one in own_settings
    }
    began = time.monotonic()
    started_at = utc_now()
    pieces = list[Chunk]()
    groups, n = (
        ([[key] for key in made.plans], MOST_APART)
        if made.apart
        else ([list(made.plans)], MOST_CHUNKS)
    )

    def is_over(i: int, group: Sequence[str], share: float) -> bool:
        """Whether this share of the budget is spent, or the divergences of the group are known well enough."""
        means = [mean(found[key], divergence) for key in group if key != name and i >= MIN_CHUNKS]
        is_narrow = means and all(high - mean <= UNTIL * abs(mean) for mean, _, high in means)
        return i >= 2 and bool(is_narrow or time.monotonic() - began > share * made.budget_s)

    def keep(key: str, own: Sequence[Divergence]) -> Record:
        """Append the record of a candidate, or of the noise floor, to `path`."""
        is_floor = key == FLOOR
        kinds = tuple(kind for kind, _ in pieces[: len(own)])
        of = made.plans[name if is_floor else key]
        used = elsewhere(settings[name]) if is_floor else settings[key]
        quality = Quality(name, made.text, kinds, tuple(own), is_floor, made.budget_s)
        run = run_without_steps(
            N_CHUNK, 0, started_at=started_at, variant=key, part=QUANT, quality=quality
        )
        record = Record(path.stem, of.machine, of.model, used, run)
        save(path, record)
        return record

    try:
        with unless_empty(path), tempfile.TemporaryDirectory(prefix="mini-lab-") as folder:
            for number, group in enumerate(groups, 1):
                with contextlib.ExitStack() as stack:
                    watch(Status("loading the models"))
                    workers = {key: stack.enter_context(Worker()) for key in group}
                    for key, worker in workers.items():
                        servers = made.plans[key].settings.rpc or ()
                        worker.use(made.plans[key].lib, servers)
                        bos = worker.load(made.plans[key].file.path, settings[key]).bos
                        own = chunks(made.texts, worker.tokenize, bos, N_CHUNK)
                        if pieces and own != pieces:
                            raise LabError(
                                f"{key} splits the text into other tokens.",
                                "Compare files of one model.",
                            )
                        pieces = own
                        settings[key] = worker.new_context(settings[key])
                    n = min(n, len(pieces))
                    for i, (_, tokens) in enumerate(pieces[:n]):
                        if is_over(i, group, number / len(groups)):
                            n = (
                                i if name in group else n
                            )  # the reference's chunks bound those of later groups
                            break
                        watch(Status(f"quality: chunk {i + 1} of at most {n}"))
                        todo = {
                            "tokens": tokens,
                            "first": FIRST,
                            "path": Path(folder, f"{i}.npz" if made.apart else "logits"),
                        }
                        for key, worker in workers.items():
                            if key != name:
                                found[key].append(
                                    worker.call(Divergence, f"{CHILD}.diverge", **todo)
                                )
                                continue
                            worker.call(type(None), f"{CHILD}.keep", **todo)
                            if i < N_FLOOR:
                                worker.new_context(elsewhere(settings[name]))
                                found[FLOOR].append(
                                    worker.call(Divergence, f"{CHILD}.diverge", **todo)
                                )
                                worker.new_context(settings[name])
    except (KeyboardInterrupt, LabError):
        n = min(len(found[key]) for key in others)  # whole chunks
        for key in found if n > 1 else ():
            keep(key, found[key][:n])
        raise
    for key, measured in found.items():
        yield keep(key, measured)
    yield from side_by_side.execute(made.plans, made.blocks, path, watch, apart=made.apart)


def elsewhere(settings: Settings) -> Settings:
    """Other settings that should not change predictions: half the ubatch, and flash attention on or off."""
    on = (settings.flash_attn_resolved or settings.flash_attn) == "on"
    needs_it = settings.type_v not in (
        "f16",
        "bf16",
        "f32",
    )  # llama.cpp: a quantized V needs flash attention
    flash_attn = settings.flash_attn if needs_it else "off" if on else "on"
    n_ubatch = max(1, min(settings.n_ubatch, N_CHUNK) // 2)
    return replace(settings, n_ubatch=n_ubatch, flash_attn=flash_attn, flash_attn_resolved=None)


def chunks(
    texts: Mapping[str, str], tokenize: Callable[[str], list[int]], bos: int | None, n_chunk: int
) -> list[Chunk]:
    """All whole chunks of texts by their kind, in an order in which every beginning has the kinds in proportion.

    If the model adds BOS before a text, it stands before each text and replaces the first token of each chunk. LabError
    for fewer than 2 chunks.
    """
    placed = list[tuple[float, Chunk]]()
    n_tokens = 0
    for kind, text in texts.items():
        ids = ([] if bos is None else [bos]) + tokenize(text)
        n_tokens = n_tokens + len(ids)
        n = min(len(ids) // n_chunk, MOST_CHUNKS)
        for i in range(n):
            tokens = ids[i * n_chunk : (i + 1) * n_chunk]
            placed.append(((i + 0.5) / n, (kind, tokens if bos is None else [bos, *tokens[1:]])))
    if len(placed) < 2:
        hint = f"Give a longer one: 16 chunks ({16 * n_chunk:,} tokens) show differences of more than 10 %."
        raise LabError(
            f"The text has {n_tokens:,} tokens, too few for two chunks of {n_chunk}.", hint
        )
    return [chunk for _, chunk in sorted(placed, key=lambda one: one[0])]


PHASES = {"decode": "tpot_ms", "prefill": "prefill_s"}
ENDS = ("", "_low", "_high")
NAN = float("nan")
UNCLEAR: tuple[tuple[float, ...], tuple[str, ...]] = (NAN, NAN, NAN), ()
"""A ratio with its ends, and its doubts, where no speed was measured."""

ABOUT = (
    "Divergence is the mean Kullback-Leibler divergence (in nats) of the next token's distribution from the "
    "reference's, over the second half of chunks of 512 tokens; 0 is equal. Same top: the share of these positions at "
    "which both find the same token most likely. Intervals (95 %) are over chunks, those of speed over blocks."
)
LIMITS = "Not measured: how well a model does a task, and what it answers with a chat template or in long chats."
CAPTION = (
    "To the right faster than the reference, down closer to it. Bars are 95 % intervals, the line is the front. "
    "A cross shows the speed if only the bytes read counted. Below the shaded noise floor nothing can be told apart."
)


@dataclass(frozen=True)
class Found:
    """What a session found. `rows` has a row for each file or cache type, the reference first.

    `kinds` has a row for each of them and each kind of text. `floor` is the mean divergence of the reference from
    itself under other settings. `equal` are the pairs that the divergence cannot tell apart.
    """

    rows: pd.DataFrame
    kinds: pd.DataFrame
    floor: float | None
    equal: list[tuple[str, str]]
    n_positions: int


def of_sessions(records: Sequence[Record]) -> list[tuple[list[Record], Found]]:
    """Each session with quality, and what it found."""
    sessions = grouped(records, lambda record: record.session).values()
    return [(own, found(own)) for own in sessions if any(candidates(own))]


def candidates(records: Sequence[Record]) -> Iterator[tuple[Record, Quality]]:
    """The records with what was found of candidates."""
    for record in records:
        if (quality := record.run.quality) and not quality.is_floor:
            yield record, quality


def quant_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row for each file or cache type that `quant` compared, the reference first.

        lab.quant_table(records)[["label", "kl", "same", "decode", "on_front"]]

    `kl`: mean divergence in nats, `same`: share of positions with the same most likely token, both with their 95 %
    intervals (`_low`, `_high`). `decode`, `prefill`: how many times as fast as the reference. LabError for records that
    hold no quality.
    """
    import pandas as pd

    tables = [one.rows.assign(session=own[0].session) for own, one in of_sessions(records)]
    if not tables:
        raise LabError("These records hold no quality.", "Measure it: lab quant")
    return pd.concat(tables, ignore_index=True)


def found(records: Sequence[Record]) -> Found:
    """The figures of one session."""
    import pandas as pd

    qualities = {record.run.variant or "": quality for record, quality in candidates(records)}
    first = next(iter(qualities.values()))
    of_variant = _of_variants(records)
    floors = [
        record.run.quality
        for record in records
        if record.run.quality and record.run.quality.is_floor
    ]
    variants = [first.reference, *qualities]
    labels = {name: name.partition(": ")[2] or name for name in variants}
    if all(name in of_variant for name in variants):  # the shortest names that differ
        for name_of in (
            lambda one: one.model.file.rpartition("/")[2],
            lambda one: one.model.quantization,
            lambda one: f"{one.settings.type_k} cache",
        ):
            names = [name_of(of_variant[name]) for name in variants]
            labels = (
                dict(zip(variants, names, strict=True))
                if all(names) and len(set(names)) == len(names)
                else labels
            )
    ratios = _ratios([one for one in records if one.run.is_timed])
    rows = list[dict[str, Any]]()
    kinds = list[dict[str, Any]]()
    for name in variants:
        quality = qualities.get(name)
        row = {"label": labels[name], "variant": name, "is_reference": name not in qualities}
        perplexity = _exp(mean(first.chunks, lambda chunk: chunk.reference_nll)[0])
        row |= of_chunks(quality.chunks) if quality else {"perplexity": perplexity}
        for phase in PHASES:
            ratio, row[f"{phase}_doubts"] = ratios.get((phase, first.reference, name), UNCLEAR)
            row |= _with_ends(phase, ratio)
        row |= dict.fromkeys(("n_bytes", "memory_bytes", "bytes_per_token"), NAN)
        if record := of_variant.get(name):
            model = record.model
            settings = record.settings
            run = record.run
            row["n_bytes"] = float(model.n_bytes or NAN)
            if run.placement:
                row["memory_bytes"] = float(sum(buffer.n_bytes for buffer in run.placement.buffers))
            if step := cost.step(
                model, 1, run.n_prompt + run.n_gen // 2, 1, settings.type_k, settings.type_v
            ):
                row["bytes_per_token"] = step.n_bytes
        rows.append(row)
        by_kind = (
            grouped(zip(quality.texts, quality.chunks, strict=True), itemgetter(0))
            if quality
            else {}
        )
        for kind, own in by_kind.items():
            kinds.append(
                {"label": labels[name], "text": kind, **of_chunks([chunk for _, chunk in own])}
            )
    table = pd.DataFrame(rows)
    pairs = list(itertools.combinations(qualities, 2))
    table["bandwidth"] = table.bytes_per_token.iloc[0] / table.bytes_per_token
    closer = {(first.reference, name) for name in qualities}  # the first of each pair
    equal = list[tuple[str, str]]()
    for (
        one,
        other,
    ) in pairs:  # by ratios chunk by chunk: on a difficult chunk every candidate diverges more
        each = zip(qualities[one].chunks, qualities[other].chunks, strict=False)
        logs = [math.log(max(divergence(a), 1e-12) / max(divergence(b), 1e-12)) for a, b in each]
        centre = math.fsum(logs) / len(logs)
        confidence = 1 - (1 - stats.CONFIDENCE) / len(pairs)  # of all together
        if len(logs) > 1 and abs(centre) > stats.mean_half_width(logs, confidence):
            closer.add((one, other) if centre < 0 else (other, one))
        else:
            equal.append((labels[one], labels[other]))

    def beats(one: str, other: str) -> bool:
        """Whether `one` is better in quality and speed than `other`, both beyond their intervals."""
        (_, low, _), doubts = ratios.get(("decode", other, one), UNCLEAR)
        return (one, other) in closer and low > 1 and shown.DISTURBED not in doubts

    table["on_front"] = [not any(beats(one, name) for one in variants) for name in variants]
    floor = (
        mean([chunk for one in floors for chunk in one.chunks], divergence)[0] if floors else None
    )
    return Found(table, pd.DataFrame(kinds), floor, equal, sum(len(one.kl) for one in first.chunks))


def _of_variants(records: Sequence[Record]) -> dict[str, Record]:
    """A record of each variant: a timed run if there is one. The noise floor has the reference's model."""
    kept = [(one.run.quality, one) for one in records if one.run.quality]
    found = {of.reference if of.is_floor else one.run.variant or "": one for of, one in kept}
    return found | {one.run.variant or "": one for one in records if one.run.is_timed}


def divergence(chunk: Divergence) -> float:
    """The mean over a chunk's positions."""
    return math.fsum(chunk.kl) / len(chunk.kl)


def mean(chunks: Sequence[Divergence], figure: Any) -> tuple[float, float, float]:
    """The mean over chunks and its interval, NaN for a single chunk."""
    values = [figure(chunk) for chunk in chunks]
    centre = math.fsum(values) / len(values)
    half = stats.mean_half_width(values, stats.CONFIDENCE) if len(values) > 1 else NAN
    return centre, centre - half, centre + half


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # a larger one would overflow


def _with_ends(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {name + end: value for end, value in zip(ENDS, values, strict=True)}


def of_chunks(chunks: Sequence[Divergence]) -> dict[str, Any]:
    """The figures of a candidate: divergence, agreement and perplexity, with their intervals."""
    import numpy as np

    kl = np.concatenate([chunk.kl for chunk in chunks])
    return {
        "n_chunks": len(chunks),
        "kl_99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        **_with_ends("kl", mean(chunks, divergence)),
        **_with_ends("same", mean(chunks, lambda chunk: chunk.n_same / len(chunk.kl))),
        **_with_ends(
            "perplexity_ratio",
            [*map(_exp, mean(chunks, lambda chunk: chunk.nll - chunk.reference_nll))],
        ),
        "perplexity": _exp(mean(chunks, lambda chunk: chunk.nll)[0]),
        "kl_most": float(np.mean([NAN if chunk.most is None else chunk.most for chunk in chunks])),
    }


def _ratios(records: Sequence[Record]) -> dict[tuple[str, str, str], Any]:
    """For each phase and pair of variants how many times as fast the second is: estimate, low and high; doubts."""
    try:
        groups = comparison.groups(records)
    except LabError:  # no speed was measured
        return {}
    made = dict[tuple[str, str, str], Any]()
    phase_of = {figure: phase for phase, figure in PHASES.items()}
    for base in groups:
        others = [one for one in groups if one is not base]
        name = str(base.rows.variant.iloc[0])
        made |= {(phase, name, name): ((1.0, 1.0, 1.0), ()) for phase in PHASES}
        for group, compared in zip(others, comparison.compare_groups([base, *others]), strict=True):
            for row in (row for row in compared.rows if row.figure in phase_of):
                ends = (1 / row.ratio.high, 1 / row.ratio.low) if row.ratio else (NAN, NAN)
                key = phase_of[row.figure], name, str(group.rows.variant.iloc[0])
                made[key] = (1 / row.estimate, *ends), row.doubts
    return made


def _cell(row: Any, name: str, scale: float = 1.0, unit: str = "", most: float = math.inf) -> str:
    """A figure with its interval, between 0 and `most`, in a second line."""
    value, low, high = (scale * getattr(row, name + end) for end in ENDS)
    if value != value:
        return UNKNOWN
    first = f"{digits(value)}{unit}"
    return (
        first
        if low != low or low == high
        else f"{first}\n{digits(max(low, 0))}-{digits(min(high, most))}"
    )


COLUMNS: Columns = (
    ("name", lambda row: f"{row.label}{' (reference)' if row.is_reference else ''}"),
    ("MB", lambda row: digits(row.n_bytes / 1e6)),
    ("divergence", lambda row: _cell(row, "kl")),
    ("same top\n%", lambda row: _cell(row, "same", 100, most=100)),
    ("decode", lambda row: _cell(row, "decode", 1, f"x{shown.mark(row.decode_doubts)}")),
    ("prefill", lambda row: _cell(row, "prefill", 1, f"x{shown.mark(row.prefill_doubts)}")),
    (
        "by bytes\nalone",
        lambda row: UNKNOWN if row.bandwidth != row.bandwidth else times(row.bandwidth),
    ),
    ("divergence\n99 %", lambda row: digits(row.kl_99)),
    ("divergence\nlargest", lambda row: digits(row.kl_max)),
    ("perplexity", lambda row: digits(row.perplexity)),
    ("perplexity\nratio", lambda row: _cell(row, "perplexity_ratio")),
    ("memory\nMB", lambda row: digits(row.memory_bytes / 1e6)),
    ("MB read\nper token", lambda row: digits(row.bytes_per_token / 1e6)),
)


def sections(records: Sequence[Record]) -> list[Section]:
    """A section for each session; none for speed without quality."""
    made = []
    for own, one in of_sessions(records):
        rows = list(one.rows.itertuples())
        kinds = one.kinds
        parts = list[Section]()
        timed = [record for record in own if record.run.is_timed]
        if kinds.text.nunique() > 1:
            each = kinds.itertuples()
            cells = [
                f"{_cell(k, 'kl')}\n{percent(k.same)} of {plural(k.n_chunks, 'chunk')}"
                for k in each
            ]
            by_text = (
                kinds.assign(cell=cells)
                .pivot(index="label", columns="text", values="cell")
                .fillna("")
            )
            by_text = by_text.loc[[row.label for row in rows[1:]], kinds.text.unique()]
            table = {
                "headings": ["name", *by_text.columns],
                "cells": by_text.reset_index().to_numpy().tolist(),
            }
            parts = [Section("", "divergence and same top by kind of text", **table)]
        floor = [] if one.floor is None else [one.floor]
        tables = {
            "quant": one.rows.to_dict("records"),
            "quant_texts": kinds.to_dict("records"),
            "quant_floor": floor,
        }
        made.append(
            Section(
                "Quality and speed",
                f"{rows[1].n_chunks:.0f} chunks, {one.n_positions:,} positions, against {rows[0].label}",
                name="quant",
                question="What does each quantization cost in quality, and what does it gain in speed?",
                answer=answer(one),
                words=[ABOUT],
                **tabled(COLUMNS, rows),
                sentences=sentences(own, one),
                warnings=text_results.disturbed(timed),
                parts=parts,
                pictures=[
                    Picture(
                        "quant",
                        CAPTION,
                        partial(draw, one, text_setup.where(timed or own)),
                        (10, 5.2),
                    )
                ],
                data=partial(dict, tables),
            )
        )
    return made


def answer(found: Found) -> str:
    """What the files that no other one beats gain and lose, in one sentence."""
    first, *others = found.rows.sort_values("kl", na_position="first").itertuples()
    said = list[str]()
    for row in others:
        if row.on_front and row.decode == row.decode and shown.DISTURBED not in row.decode_doubts:
            is_sure = row.decode_low == row.decode_low
            share = percent(row.same)
            ends = f" ({digits(row.decode_low)}-{digits(row.decode_high)})" if is_sure else ""
            gain = f"{row.label}{'' if said else ' decodes'} {'' if is_sure else 'about '}{times(row.decode)}"
            of = (
                f"{ends} and on {share}"
                if said
                else f" as fast as {first.label}{ends} and agrees with it on {share} of tokens"
            )
            said.append(gain + of)
    shares = join_and([f"{row.label} on {percent(row.same)}" for row in others])
    return (
        f"{'; '.join(said)}."
        if said
        else f"Agreement with {first.label} on the most likely token: {shares}."
    )


def sentences(records: Sequence[Record], found: Found) -> list[str]:
    """Which files are beaten in both, what cannot be told apart, and the basis of the figures."""
    first, *others = found.rows.itertuples()
    lines = list[str]()
    known = [row for row in others if row.decode == row.decode]
    if known and all(shown.DISTURBED in row.decode_doubts for row in known):
        lines.append(
            "The speeds are unclear: at least half of the runs were disturbed. Measure again."
        )
    elif known:
        front, beaten = (
            [row.label for row in (first, *others) if row.on_front == good]
            for good in (True, False)
        )
        more = (
            f"; {join_and(beaten)} {'is' if len(beaten) == 1 else 'are'} beaten in both"
            if beaten
            else ""
        )
        lines.append(
            f"No other one is better in both quality and decode speed than {join_and(front)}{more}."
        )
    if found.equal:
        pairs = join_and([f"{a} and {b}" for a, b in found.equal])
        lines.append(f"By divergence these cannot be told apart: {pairs}.")
    if found.floor is not None:
        below = [row.label for row in others if not row.kl_low > found.floor]
        same = f" {join_and(below)} cannot be told from {first.label}." if below else ""
        floor = f"{max(0.0, found.floor):.2g}"
        lines.append(
            f"The noise floor, {first.label} against itself with other settings, is {floor}.{same}"
        )
    model = next((one for one in records if one.run.variant == first.variant), records[0]).model
    if model.source == catalog.REQUANTIZED and model.name in catalog.entries():
        kind = catalog.entries()[model.name].quantization
        lines.append(
            f"{first.label} was made from the {kind} file: what is lost is lost of that, not of the original."
        )
    if bounded := [row for row in others if row.kl_most == row.kl_most]:
        ends = join_and(
            [f"{digits(row.kl)}-{digits(row.kl_most)} for {row.label}" for row in bounded]
        )
        lines.append(
            "The models ran one after the other, and the reference's 1,024 most likely tokens and the sum of the rest "
            f"were kept: divergences are the least that is possible. Within these bounds: {ends}."
        )
    if widths := [
        (row.kl_high - row.kl) / row.kl for row in others if row.kl > 0 and row.kl_low == row.kl_low
    ]:
        lines.append(
            f"The divergences are known to within {percent(max(widths))} or better, on text like this."
        )
    return [*lines, LIMITS]


def known_lines(folder: Path, tried: Sequence[Record]) -> list[str]:
    """What `lab quant` found in a folder for the files of these records in sentences; the newest of each comparison."""
    lines = dict[str, str]()
    models = [one.model for one in tried]
    for own, one in of_sessions(results.nearby([folder]).findings):
        by_variant = {record.run.variant: record for record, _ in candidates(own)}
        first, *others = one.rows.itertuples()
        for row in others:
            model = by_variant[row.variant].model
            type_k = by_variant[row.variant].settings.type_k
            name = f"{model.name} {model.quantization}"
            same = {each.sha256 for each in models if f"{each.name} {each.quantization}" == name}
            if same and (model.sha256 is None or same & {None, model.sha256}):
                of = f"Quality of {name}{'' if type_k == 'f16' else f' with a {type_k} cache'} by lab quant"
                what = f"divergence {digits(row.kl)} from {first.label}, same most likely token at {percent(row.same)}"
                lines.setdefault(f"{of} {first.label}", f"{of}: {what}.")
    return list(lines.values())


def draw(found: Found, subject: str, figure: Figure) -> None:
    """Speed against divergence: decode on the left, prefill on the right."""
    rows = [row for row in found.rows.itertuples() if not row.is_reference and row.kl > 0]
    reference = found.rows.label.iloc[0]
    axes = list(figure.subplots(1, 2, sharey=True))
    marked = list[Any]()
    for ax, phase in zip(axes, PHASES, strict=True):
        known = [(row, *(getattr(row, phase + end) for end in ENDS)) for row in rows]
        known = [one for one in known if one[1] == one[1]]
        ax.set_yscale("log")
        ax.set_xlabel(f"{phase}: times as fast as {reference}")
        ax.axvline(1, color=canvas.GUIDE, lw=1, ls=":")
        for row, x, low, high in known:
            colour = canvas.COLOURS[0 if row.on_front else 1]
            label = "not beaten in both" if row.on_front else "beaten in quality and decode speed"
            ax.plot([x], [row.kl], "o", color=colour, label=label)
            ax.plot(
                [low, high], [row.kl, row.kl], color=colour, lw=1.4
            )  # nothing where an end is NaN
            ax.plot([x, x], [max(row.kl_low, row.kl / 1e3), row.kl_high], color=colour, lw=1.4)
            if phase == "decode" and row.bandwidth == row.bandwidth:
                ax.plot(
                    [row.bandwidth], [row.kl], "x", color=canvas.GUIDE, label="by bytes read alone"
                )
        if phase == "decode":
            front = sorted((row.kl, x) for row, x, *_ in known if row.on_front)
            ax.plot(
                [x for _, x in front],
                [y for y, _ in front],
                color=canvas.COLOURS[0],
                lw=1,
                ls="--",
                label="front",
            )
        if found.floor and found.floor > 0:
            low, high = ax.get_ylim()
            ax.set_ylim(min(low, found.floor / 3), high)
            ax.axhspan(ax.get_ylim()[0], found.floor, color=canvas.GRID, label="noise floor")
        sizes = [
            "" if row.n_bytes != row.n_bytes else f", {digits(row.n_bytes / 1e6)} MB"
            for row, *_ in known
        ]
        marked.append(
            [(x, row.kl, row.label + size) for (row, x, *_), size in zip(known, sizes, strict=True)]
        )
    axes[0].set_ylabel("mean divergence (nats)")
    canvas.finish(axes, f"Quality against speed, over {reference}\n{subject}", is_apart=True)
    crosses = [(row.bandwidth, row.kl) for row in rows if row.bandwidth == row.bandwidth]
    for ax, points, avoid in zip(axes, marked, (crosses, []), strict=True):
        canvas.label_points(ax, points, avoid)


KINDS = (
    Kind(
        "quant",
        lambda one: isinstance(one, Record) and one.run.part == QUANT,
        lambda records, _: sections(records),
    ),
)


@click.command("quant", cls=Command, first=("cache-type", "text", "budget", "blocks"))
@click.argument("files", nargs=-1, metavar="[REFERENCE FILE...]")
@with_options(
    *experiment.options(plan).values(),
    click.option(
        "--csv",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Also write the table to a CSV file.",
    ),
    click.option(
        "--yes", is_flag=True, help="Download what a name of the catalog needs without asking."
    ),
    *ENGINE,
    SEED,
    *OUTPUT,
)
def command(
    files: tuple[str, ...], cache_type: str, csv: str | None, yes: bool, **asked: Any
) -> None:
    """Show what quantizations cost in quality and gain in speed.

    \b
      lab quant                           # the embedded model, requantized
      lab quant model-F16.gguf model-Q8_0.gguf model-Q4_K_M.gguf
      lab quant llama-3.2-1b              # the catalog's files, downloaded

    The first file is the reference. All files predict the same text, in chunks of 512 tokens: the table shows how far
    each one's predictions are from the reference's (mean Kullback-Leibler divergence), and how often both find the same
    token most likely. The reference against itself with other settings shows the noise floor. Chunks are added until
    the divergences are known to 5 %, the text ends or the --budget is spent. Then the speeds are measured in blocks, as
    lab ab does.

    The output names the files that no other one beats in both. It does not say how well a model does a task. Files of
    other models are refused. Files that do not fit into memory together run one after the other, and the divergences
    are then known within bounds. A FILE is a SPEC: see lab models --help.
    """
    from lab.formats import spreadsheet
    from lab.show import console

    output = Output.taken_from(asked)
    err = console.console(stderr=True)
    if (sizes := missing(files)) and not (yes or cache_type):
        listed = ", ".join(f"{spec} {n_bytes / 1e9:.1f} GB" for spec, n_bytes in sizes.items())
        total = f"{plural(len(sizes), 'file')}, {sum(sizes.values()) / 1e9:.1f} GB"
        click.confirm(f"Download {total}: {listed}?", abort=True, err=True)
    with Worker() as worker, console.transfer(err) as transferring:
        made = plan(worker, *files, cache_type=cache_type, **asked, watch=transferring)
    introduce(list(made.plans.values()), err, err)
    path = new_results_file(next(iter(made.plans.values())), output.folder)

    def finished(record: Record) -> str:
        if not (quality := record.run.quality):
            return text_results.finished(record)
        known = f"mean divergence {mean(quality.chunks, divergence)[0]:.3g} in {plural(len(quality.chunks), 'chunk')}"
        return f"{record.run.variant}: {known}"

    records, problem = collect(
        lambda watch: execute(made, path, watch), path, err, describe=finished
    )
    if csv and any(record.run.quality for record in records):
        try:
            spreadsheet.without_formulas(quant_table(records)).to_csv(csv, index=False)
        except OSError as failed:
            raise LabError(
                f"{csv} cannot be written: {failed.strerror}.", "Choose another --csv."
            ) from None
    output.finish(records, path, problem)
