"""Ceilings and explanations as text."""

from __future__ import annotations

from collections.abc import Sequence

from lab.core import shown
from lab.core.lists import grouped, join_and, plural
from lab.core.record import Ceilings, Rate, Record
from lab.features.limits import plain_read, plot_why, probing, roofline, where
from lab.features.limits.advice import BatchLever, CacheLever, ExperimentLever, Lever, SpeculationLever
from lab.features.limits.roofline import Explained
from lab.process.wire import ATTENTION, DOWNLOAD, PLAIN_ATTENTION, UPLOAD
from lab.show import wording
from lab.show.section import UNKNOWN, Columns, Picture, Section, tabled


def of_ceilings(ceilings: Ceilings) -> Section:
    """The kernels' best rates, and the ridge of the roofline."""
    days = probing.age_days(ceilings)
    age = "today" if days < 1 else f"{days:.0f} days ago"
    label = where.device_label(ceilings.machine, ceilings.device)
    columns: Columns = (
        ("kernel", lambda rate: rate.op),
        ("type", lambda rate: rate.type),
        ("shape", _shape),
        ("buffer", lambda rate: rate.buffer),
        ("tokens", lambda rate: str(rate.n_tokens)),
        ("threads", lambda rate: UNKNOWN if ceilings.on_gpu else str(rate.n_threads)),
        ("GB/s", lambda rate: wording.digits(probing.gbps(rate))),
        ("GFLOP/s", lambda rate: wording.digits(probing.gflops(rate)) if rate.flops else UNKNOWN),
    )
    rates = sorted(ceilings.rates, key=lambda rate: (rate.op, rate.type, -rate.n_threads, *_size(rate)))
    best = roofline.roof(ceilings)
    ridge = (
        f"Best: {wording.digits(best.gbps)} GB/s and {wording.digits(best.gflops)} GFLOP/s. Arithmetic limits work "
        f"above {wording.digits(best.ridge)} FLOPs per byte (the ridge), memory traffic limits work below."
    )
    return Section(
        f"Ceilings of {label}, measured {ceilings.measured_at} ({age})",
        **tabled(columns, rates, keep_all=True),
        sentences=[ridge, *of_copies(ceilings)],
        parts=[of_ceilings(other) for other in ceilings.others or ()],
    )


def of_copies(ceilings: Ceilings) -> list[str]:
    """Sentences on copies to and from a device, and on the unknown caches of one behind a server."""
    name, sentences, words = ceilings.device, list[str](), list[str]()
    for op, direction in ((UPLOAD, "to"), (DOWNLOAD, "from")):
        copies = sorted((rate for rate in ceilings.rates if rate.op == op), key=lambda rate: rate.n_bytes)
        if copies:
            of_few = f"{copies[0].n_bytes:,} bytes in {wording.seconds(min(copies[0].times_ns) / 1e9)}"
            words.append(f"{direction} {where.label(name)} {wording.digits(probing.gbps(copies[-1]))} GB/s, {of_few}")
    if words:
        sentences.append(f"Copies: {'; '.join(words)}.")
    device = where.device(ceilings.machine, name)
    if device is not None and where.is_remote(device):
        most = max(rate.n_bytes for rate in ceilings.rates) / 1e6
        sentences.append(
            f"The server's caches are unknown. The probes read up to {most:,.0f} MB; if a cache there is larger, its "
            "memory is slower than these figures."
        )
    return sentences


def _size(rate: Rate) -> tuple[int, ...]:
    return rate.rows, rate.columns, rate.n_tokens, rate.n_positions or 0


def _shape(rate: Rate) -> str:
    """The shape of a probe: a matrix, its experts, or heads and positions."""
    if rate.op in (ATTENTION, PLAIN_ATTENTION):
        positions = f" over {rate.n_positions:,}" if rate.n_positions else ""
        return f"{rate.rows} heads of {rate.columns}{positions}"
    experts = f", {rate.n_expert_used} of {rate.n_expert}" if rate.n_expert else ""
    if rate.op in (UPLOAD, DOWNLOAD):
        return f"{rate.n_bytes:,} bytes"
    return "-" if rate.op == plain_read.READ else f"{rate.rows} x {rate.columns}{experts}"


def _shares(row: Explained) -> str:
    """The parts of a phase's time in percent; several devices have a sentence instead."""
    if row.shares or shown.ABOVE in row.doubts:
        return UNKNOWN
    kernels, rest_s = row.kernels, max(0.0, row.measured_s - row.least_s)
    parts = kernels.layers_s, kernels.attention_s, kernels.head_s, rest_s
    return "/".join(f"{100 * part / row.measured_s:.0f}" for part in parts)


EXPLAINED: Columns = (
    ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
    ("gen", lambda row: f"{row.n_gen:,}"),
    ("phase", lambda row: row.phase),
    ("measured\nms", lambda row: f"{wording.digits(1e3 * row.measured_s)}{shown.mark(row.doubts)}"),
    ("limit", lambda row: row.limit if shown.is_firm(row.doubts) else "not sure"),
    ("% of\nceiling", lambda row: ">100" if shown.ABOVE in row.doubts else f"{100 * row.of_ceiling:.0f}"),
    ("layers/attention/\noutput/rest %", _shares),
    ("GFLOP/s", lambda row: wording.digits(row.gflops)),
    ("GB/s", lambda row: wording.digits(row.gbps)),
    ("FLOPs\nper byte", lambda row: wording.digits(row.intensity)),
    ("GFLOP", lambda row: wording.digits(row.flops / 1e9)),
    ("MB", lambda row: wording.digits(row.n_bytes / 1e6)),
)


def section(
    label: str,
    records: Sequence[Record],
    rows: Sequence[Explained],
    ceilings: Ceilings,
    levers: Sequence[Lever | ExperimentLever],
) -> Section:
    """Each phase's time, limit and rates in a table; sentences on the limits, then on changes, then on the parts."""
    first = records[0]
    best = roofline.roof(ceilings, where.layers_of(first))
    roof = (
        f"Roof: {wording.digits(best.gflops)} GFLOP/s, {wording.digits(best.gbps)} GB/s, ridge at "
        f"{wording.digits(best.ridge)} FLOPs per byte (ceilings of {ceilings.measured_at})"
    )
    caption = "Roofline: the rate of each phase (numbers: prompt tokens) below the machine's best."
    pictures = [
        Picture(
            "roofline",
            caption,
            lambda figure: plot_why.plot_roofline(rows, best, label, figure.subplots()),
            (5, 4.8),
        )
    ]
    if first.run.every is None:  # a sweep generates too little for a request
        caption = f"Where the time of a request goes: prompt and {first.run.n_gen:,} generated tokens."
        pictures.append(
            Picture("where", caption, lambda figure: plot_why.plot_where(rows, label, figure.subplots()), (5, 4.8))
        )
    return Section(
        label,
        words=[roof, *(f"{shown.MARK} {sentence}" for sentence in probing.doubt_words(ceilings))],
        **tabled(EXPLAINED, rows, keep_all=True),
        sentences=[
            *verdicts(rows),
            *map(advice_of, levers),
            *(where_it_went(row) for row in rows if row.shares and shown.ABOVE not in row.doubts),
            _not_included(rows),
        ],
        pictures=pictures,
    )


def where_it_went(row: Explained) -> str:
    """A sentence with the parts of a phase's time on several devices, in percent."""
    shares = [
        (f"{share.device} {name}", part)
        for share in row.shares
        for name, part in (
            ("layers", share.kernels.layers_s),
            ("attention", share.kernels.attention_s),
            ("output", share.kernels.head_s),
        )
        if part
    ]
    shares += [] if row.between_s is None else [("between devices", row.between_s)]
    shares.append(("rest", max(0.0, row.measured_s - row.least_s)))
    percents = ", ".join(f"{name} {100 * part / row.measured_s:.0f} %" for name, part in shares)
    overlap = " (the devices work at the same time)" if row.overlaps else ""
    return f"{row.phase.capitalize()} at {row.n_prompt:,} prompt tokens: {percents}{overlap}."


def _not_included(rows: Sequence[Explained]) -> str:
    """Times that the phases do not include."""
    parts = []
    for phase, alike in grouped(rows, lambda row: row.phase).items():
        sampling, harness = (_ends([getattr(row, name) for row in alike]) for name in ("choosing_s", "harness_s"))
        parts.append(f"sampling {sampling} and the lab {harness} per {'token' if phase == 'decode' else 'prompt'}")
    return f"Not in these times: {'; '.join(parts)}."


def _ends(times_s: Sequence[float]) -> str:
    ends = dict.fromkeys(wording.seconds(value) for value in (min(times_s), max(times_s)))
    return " to ".join(ends)


def caveat(record: Record) -> str | None:
    """A sentence if ceilings do not fit a record's settings; else None."""
    settings = record.settings
    if settings.split_mode == "tensor":
        return "All devices share each layer (--split-mode tensor), but the parts assume that each has whole layers."
    if settings.override_tensor:
        return "Tensors that --override-tensor moved are counted on the device of their layer."
    if settings.type_k != settings.type_v:
        return "The ceiling of attention assumes one type for the whole cache."
    return None


LIMITS = {
    roofline.ARITHMETIC: "Arithmetic limits",
    roofline.TRAFFIC: "Memory traffic limits",
    roofline.ATTENTION: "Attention (flash attention and the type of the KV cache change it) limits",
    roofline.KERNEL: "The kernel of the quantization (other kernels here are faster) limits",
    roofline.OVERHEAD: "Overhead (time outside the large kernels) limits",
}


def verdicts(rows: Sequence[Explained]) -> list[str]:
    """Sentences on what limited the phases, with the share of the ceiling that each reached; one for each limit."""
    sentences = []
    for limit, alike in grouped([row for row in rows if shown.is_firm(row.doubts)], lambda row: row.limit).items():
        phases = [_limited(own) for own in grouped(alike, lambda row: row.phase).values()]
        sentences.append(f"{LIMITS[limit]} {' and '.join(phases)}.")
    if disturbed := [row for row in rows if shown.DISTURBED in row.doubts]:
        phases = list(dict.fromkeys(row.phase for row in disturbed))
        lengths = join_and([f"{n:,}" for n in sorted({row.n_prompt for row in disturbed})])
        sentences.append(
            f"No verdict on {' and '.join(phases)} at {lengths} prompt tokens: the runs were disturbed. Measure again "
            "while no other program runs."
        )
    if any(shown.ABOVE in row.doubts for row in rows):
        sentences.append(f"A run was faster than its ceiling, so predicted gains are not sure: {TOO_LOW}.")
    return sentences


def _limited(alike: Sequence[Explained]) -> str:
    """A phase, its lengths, and the shares of its ceiling."""
    lengths = join_and([f"{n:,}" for n in sorted({row.n_prompt for row in alike})])
    shares = join_and([f"{100 * row.of_ceiling:.0f}" for row in alike])
    if len(alike) > plot_why.FEW:
        ends = sorted(row.of_ceiling for row in alike)
        lengths = f"{alike[0].n_prompt:,} to {alike[-1].n_prompt:,}"
        shares = f"{100 * ends[0]:.0f} to {100 * ends[-1]:.0f}"
    what = "prefill of" if alike[0].phase == "prefill" else "decode after"
    return f"{what} {lengths} tokens ({shares} % of the ceiling)"


TOO_LOW = "the ceiling was measured too low; measure again: lab ceilings --again"


def advice_of(lever: Lever | ExperimentLever) -> str:
    """A sentence on a change: its predicted gain, and the command to try it."""
    how = f" Try: {lever.command}" if lever.command else ""
    return f"Predicted for {_gains_of(lever)}.{how}"


def _gains_of(lever: Lever | ExperimentLever) -> str:
    if isinstance(lever, BatchLever):
        return (
            f"{lever.n_seq} sequences decoded together: {wording.digits(lever.total_gain)}x the tokens/s in total, "
            f"{wording.digits(lever.user_share)}x per user, after prompts of {lever.n_prompt:,} tokens"
        )
    if isinstance(lever, CacheLever):
        saved, of = wording.seconds(lever.saved_s), wording.seconds(lever.ttft_s)
        return (
            f"{lever.n_cached:,} of {lever.n_cached + lever.n_new:,} prompt tokens cached: first token "
            f"{wording.digits(lever.gain)}x as fast (saves {saved} of {of})"
        )
    if isinstance(lever, SpeculationLever):
        best = "" if lever.best_n_draft == lever.n_draft else f"drafts of {lever.best_n_draft} are "
        return (
            f"drafts of {plural(lever.n_draft, 'token')}: faster if more than {100 * lever.least_acceptance:.0f} % are "
            f"accepted; at {100 * lever.acceptance:.0f} %, {best}{wording.digits(lever.gain)}x as fast (without the "
            "time to draft)"
        )
    gains = [
        f"{phase} {wording.digits(gain)}x as fast"
        for phase, gain in (
            (f"prefill of {lever.prefill_at:,} tokens", lever.prefill_gain),
            (f"decode after {lever.decode_at:,}", lever.decode_gain),
        )
        if gain
    ]
    return f"{lever.change}: {', '.join(gains)}"
