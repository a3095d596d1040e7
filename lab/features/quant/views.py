"""What `lab quant` found, as sentences, tables and a picture: how much faster against how far from the reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core import results, shown
from lab.core.lists import join_and, plural
from lab.core.record import QUANT, Ceilings, Model, Record
from lab.features.measure import text_results
from lab.features.quant import figures
from lab.features.quant.figures import Found
from lab.models import catalog
from lab.runner import as_options
from lab.show import canvas, text_setup
from lab.show.section import UNKNOWN, Columns, Kind, Picture, Section, tabled
from lab.show.wording import digits, percent, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def sections(records: Sequence[Record], ceilings: Sequence[Ceilings] = ()) -> list[Section]:
    """A section for each session; none for speed without quality."""
    return [_section(own, one) for own, one in figures.of_sessions(records, ceilings)]


def _section(records: Sequence[Record], found: Found) -> Section:
    rows = list(found.rows.itertuples())
    timed = [one for one in records if one.run.is_timed]
    subject = text_setup.where(timed or records)
    by_text = Section("", "divergence and same top by kind of text", **tabled(_of_kinds(found), rows[1:]))
    return Section(
        "Quality and speed",
        f"{found.n_chunks} chunks, {found.n_positions:,} positions, against {rows[0].label}",
        name="quant",
        question="What does each quantization cost in quality, and what does it gain in speed?",
        answer=answer(found),
        words=[ABOUT],
        **tabled(COLUMNS, rows),
        sentences=sentences(records, found),
        warnings=text_results.disturbed(timed),
        parts=[by_text] if found.kinds.text.nunique() > 1 else [],
        pictures=[Picture("quant", CAPTION, partial(draw, found, subject), (10, 5.2))],
        data=lambda: {
            "quant": _plain(found.rows),
            "quant_texts": _plain(found.kinds),
            "quant_floor": [] if found.floor is None else [found.floor],
        },
    )


def _plain(rows: Any) -> list[dict[str, Any]]:
    """Rows for JSON, without figures that are missing."""
    return [{key: one for key, one in row.items() if one == one} for row in rows.to_dict("records")]


def _ends(row: Any, name: str, scale: float = 1.0, unit: str = "") -> str:
    """A figure with its interval in a second line."""
    value, low, high = (scale * getattr(row, end) for end in (name, f"{name}_low", f"{name}_high"))
    if value != value:
        return UNKNOWN
    first = f"{digits(value)}{unit}"
    return first if low != low or low == high else f"{first}\n{digits(max(low, 0))}-{digits(high)}"


def _speed(phase: str, row: Any) -> str:
    return _ends(row, phase, 1, f"x{shown.mark(getattr(row, f'{phase}_doubts'))}")


def _size(name: str, row: Any) -> str:
    return digits(getattr(row, name) / 1e6)


COLUMNS: Columns = (
    ("name", lambda row: f"{row.label}{' (reference)' if row.is_reference else ''}"),
    ("MB", partial(_size, "n_bytes")),
    ("divergence", lambda row: _ends(row, "kl")),
    ("same top\n%", lambda row: _ends(row, "same", 100)),
    ("decode", partial(_speed, "decode")),
    ("prefill", partial(_speed, "prefill")),
    ("by bytes\nalone", lambda row: UNKNOWN if row.bandwidth != row.bandwidth else times(row.bandwidth)),
    ("divergence\n99 %", lambda row: digits(row.kl_99)),
    ("divergence\nlargest", lambda row: digits(row.kl_max)),
    ("perplexity", lambda row: digits(row.perplexity)),
    ("perplexity\nratio", lambda row: _ends(row, "perplexity_ratio")),
    ("memory\nMB", partial(_size, "memory_bytes")),
    ("MB read\nper token", partial(_size, "bytes_per_token")),
    ("ceiling\ntokens/s", lambda row: digits(row.ceiling_tps)),
)


def _of_kinds(found: Found) -> Columns:
    """A column for each kind of text."""

    def cell(kind: str, row: Any) -> str:
        own = found.kinds[(found.kinds.label == row.label) & (found.kinds.text == kind)]
        return "".join(
            f"{_ends(one, 'kl')}\n{percent(one.same)} of {plural(one.n_chunks, 'chunk')}" for one in own.itertuples()
        )

    kinds = list(dict.fromkeys(found.kinds.text))
    return (("name", lambda row: row.label), *((kind, partial(cell, kind)) for kind in kinds))


def answer(found: Found) -> str:
    """What the files that no other one beats gain and lose, in one sentence."""
    first, *others = found.rows.sort_values("kl", na_position="first").itertuples()
    known = [row for row in others if row.decode == row.decode and shown.DISTURBED not in row.decode_doubts]
    said = list[str]()
    for row in [row for row in known if row.on_front]:
        is_sure = row.decode_low == row.decode_low
        gain = f"{row.label} {'' if said else 'decodes '}{'' if is_sure else 'about '}{times(row.decode)}"
        ends = f" ({digits(row.decode_low)}-{digits(row.decode_high)})" if is_sure else ""
        share = f"{percent(row.same)}{'' if said else ' of tokens'}"
        said.append(
            f"{gain}{ends} and on {share}"
            if said
            else f"{gain} as fast as {first.label}{ends} and agrees with it on {share}"
        )
    shares = join_and([f"{row.label} on {percent(row.same)}" for row in others])
    return f"{'; '.join(said)}." if said else f"Agreement with {first.label} on the most likely token: {shares}."


def sentences(records: Sequence[Record], found: Found) -> list[str]:
    """Which files are beaten in both, what cannot be told apart, and the basis of the figures."""
    first, *others = found.rows.itertuples()
    lines, known = list[str](), [row for row in others if row.decode == row.decode]
    if known and all(shown.DISTURBED in row.decode_doubts for row in known):
        lines.append("The speeds are unclear: at least half of the runs were disturbed. Measure again.")
    elif known:
        front, beaten = ([row.label for row in (first, *others) if row.on_front == good] for good in (True, False))
        more = f"; {join_and(beaten)} {'is' if len(beaten) == 1 else 'are'} beaten in both" if beaten else ""
        lines.append(f"No other one is better in both quality and decode speed than {join_and(front)}{more}.")
    if found.equal:
        pairs = join_and([f"{a} and {b}" for a, b in found.equal])
        lines.append(f"By divergence these cannot be told apart: {pairs}.")
    if found.floor is not None:
        below = [row.label for row in others if not row.kl_low > found.floor]
        same = f" {join_and(below)} cannot be told from {first.label}." if below else ""
        floor = f"{max(0.0, found.floor):.2g}"
        lines.append(f"The noise floor, {first.label} against itself with other settings, is {floor}.{same}")
    model = next((one for one in records if one.run.variant == first.variant), records[0]).model
    if model.source == catalog.REQUANTIZED and model.name in catalog.entries():
        kind = catalog.entries()[model.name].quantization
        lines.append(f"{first.label} was made from the {kind} file: what is lost is lost of that, not of the original.")
    if bounded := [row for row in others if row.kl_most == row.kl_most]:
        ends = join_and([f"{digits(row.kl)}-{digits(row.kl_most)} for {row.label}" for row in bounded])
        lines.append(
            "The models ran one after the other, and the reference's 1,024 most likely tokens and the sum of the rest "
            f"were kept: divergences are the least that is possible. Within these bounds: {ends}."
        )
    widths = [(row.kl_high - row.kl) / row.kl for row in others if row.kl > 0 and row.kl_low == row.kl_low]
    if widths:
        lines.append(f"The divergences are known to within {percent(max(widths))} or better, on text like this.")
    return [*lines, LIMITS]


def known_lines(folder: Path, models: Sequence[Model]) -> list[str]:
    """What sessions of `lab quant` in a folder found for these files, in sentences."""
    records, lines = results.nearby([folder], holding=b'"quality":{').traces, list[str]()
    measured = {record.model.name for record in records}
    for model in (one for one in models if one.name in measured):
        for row in figures.known_quality(records, model).itertuples():
            cache = "" if row.type_k == "f16" else f" with a {row.type_k} cache"
            lines.append(
                f"Quality of {model.name} {model.quantization}{cache} by lab quant, the same on every device: "
                f"divergence {digits(row.kl)} from {row.reference}, the same most likely token at {percent(row.same)}."
            )
    return list(dict.fromkeys(lines))


def draw(found: Found, subject: str, figure: Figure) -> None:
    """Speed against divergence: decode on the left, prefill on the right."""
    rows = [row for row in found.rows.itertuples() if not row.is_reference and row.kl > 0]
    axes = list(figure.subplots(1, 2, sharey=True))
    for ax, phase in zip(axes, figures.PHASES, strict=True):
        _panel(ax, rows, found, phase)
    axes[0].set_ylabel("mean divergence (nats)")
    canvas.finish(axes, f"Quality against speed, over {found.rows.label.iloc[0]}\n{subject}", is_apart=True)
    for ax, phase in zip(axes, figures.PHASES, strict=True):
        at = [(getattr(row, phase), row.kl, row.label + _megabytes(row)) for row in rows]
        crosses = [(row.bandwidth, row.kl) for row in rows if row.bandwidth == row.bandwidth]
        canvas.label_points(ax, [one for one in at if one[0] == one[0]], crosses if phase == "decode" else [])


def _megabytes(row: Any) -> str:
    return "" if row.n_bytes != row.n_bytes else f", {digits(row.n_bytes / 1e6)} MB"


def _panel(ax: Axes, rows: Sequence[Any], found: Found, phase: str) -> None:
    ax.set_yscale("log")
    ax.set_xlabel(f"{phase}: times as fast as {found.rows.label.iloc[0]}")
    ax.axvline(1, color=canvas.GUIDE, lw=1, ls=":")
    for row in rows:
        x, low, high = (getattr(row, name) for name in (phase, f"{phase}_low", f"{phase}_high"))
        if x != x:
            continue
        colour = canvas.COLOURS[0] if row.on_front else canvas.COLOURS[1]
        label = "not beaten in both" if row.on_front else "beaten in quality and decode speed"
        ax.plot([x], [row.kl], "o", color=colour, label=label)
        if low == low:
            ax.plot([low, high], [row.kl, row.kl], color=colour, lw=1.4)
        if row.kl_low == row.kl_low:
            ax.plot([x, x], [max(row.kl_low, row.kl / 1e3), row.kl_high], color=colour, lw=1.4)
        if phase == "decode" and row.bandwidth == row.bandwidth:
            ax.plot([row.bandwidth], [row.kl], "x", color=canvas.GUIDE, label="by bytes read alone")
    if phase == "decode":
        front = sorted((row.kl, row.decode) for row in rows if row.on_front and row.decode == row.decode)
        ax.plot([x for _, x in front], [y for y, _ in front], color=canvas.COLOURS[0], lw=1, ls="--", label="front")
    if found.floor and found.floor > 0:
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, found.floor / 3), high)
        ax.axhspan(ax.get_ylim()[0], found.floor, color=canvas.GRID, label="noise floor")


def again(records: Sequence[Record]) -> str:
    """The command of a session of `lab quant`."""
    timed = [one for one in records if one.run.is_timed]
    kept = [(one, one.run.quality) for one in records if one.run.quality]
    of_variant = {one.run.variant or "": one for one in timed}
    of_variant |= {of.reference if of.is_floor else one.run.variant or "": one for one, of in kept}
    firsts = [of_variant[name] for name in sorted(of_variant)]
    blocks = 1 + max((one.run.block or 0 for one in timed), default=0)
    asked = next((quality for _, quality in kept), None)
    given: dict[str, object] = {"blocks": blocks if timed else None}
    if asked:
        budget = None if asked.budget_s is None else f"{asked.budget_s:g}s"
        given |= {"text": asked.text, "budget": budget, "until": asked.until}
    given |= {"prompt_len": timed[0].run.n_prompt, "gen": timed[0].run.n_gen} if timed else {}
    specs = list(dict.fromkeys(catalog.spec_of(one.model) for one in firsts))
    shared = [words for words in as_options.shared(firsts) if words[0] not in ("--model", "--prompt")]
    if len(specs) == 1:
        given["cache_type"] = [one.settings.type_k for one in firsts]
        shared = [words for words in shared if not words[0].startswith("--cache-type")]
    return as_options.line("quant", given, [(spec,) for spec in specs], shared)


KINDS = (
    Kind(
        "quant",
        lambda one: isinstance(one, Record) and one.run.part == QUANT,
        lambda records, context: sections(records, context.ceilings),
        again,
    ),
)
