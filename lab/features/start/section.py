"""Starts as a table of stages, in sentences, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lab.core.lists import grouped, plural
from lab.features.start import figures
from lab.features.start.figures import DiskWait, StartSetup
from lab.features.start.lines import COLD, LOAD, PREFILL, STAGES, WARM, StartLine
from lab.features.start.picture import draw_starts
from lab.show import text_setup
from lab.show.cells import Cell, listed, stacked
from lab.show.section import Picture, Section, tabled
from lab.show.wording import UNKNOWN, digits, percent, seconds

if TYPE_CHECKING:
    import pandas as pd

OF_STAGES = {
    "process": "start Python, load the libraries",
    "load": "place and repack the weights",
    "context": "make the context",
    "warm-up": "decode one token",
    "first prefill": "the prompt, and the first token",
}
CAPTION = "Each bar is the start with the median time, the points are all starts."
AS_FAST = 0.8  # of the time of a read in order: from here on the disk is the limit
SLOWER = 1.25
NOT_COLD = (
    "The file's pages did not leave the page cache, or the system does not say whether they did: "
    "nothing is said about starts from the disk."
)
VIRTUAL = (
    "This machine is virtual: its host may still have the file in memory. A start right after a "
    "restart of the host can take longer."
)


def sections(lines: Sequence[StartLine]) -> list[Section]:
    """A section for each session."""
    by_session = grouped(lines, lambda line: line.session)
    return [section(lines_of_session) for lines_of_session in by_session.values()]


def section(lines: Sequence[StartLine]) -> Section:
    """The stages of the starts of a session."""
    line = lines[0]
    table = figures.starts_table(lines)
    setups = figures.setups(table)
    where = text_setup.where(lines)
    draw = partial(draw_starts, setups=setups, subject=where)
    pictures = [Picture("start", CAPTION, draw, (10, 4.6))] if setups else []
    columns = listed(["stage", *map(heading, setups)])
    return Section(
        where,
        f"seconds from nothing to the first token after {plural(line.n_prompt, 'token')}: the "
        "median start",
        "the range of all starts",
        name="start",
        question="What does it take until the first token can come?",
        answer=answer(line, table),
        **tabled(columns, cells(setups), keep_all=True),
        warnings=warnings(lines),
        sentences=sentences(line, table, setups),
        notes=notes(line, setups),
        pictures=pictures,
        data=lambda: {"starts": document(lines)},
    )


def notes(line: StartLine, setups: Sequence[StartSetup]) -> list[str]:
    """What the stages are; what a virtual machine may hide."""
    stages = "; ".join(f"{stage}: {what}" for stage, what in OF_STAGES.items())
    is_doubtful = line.machine.virtual and has_cold(setups)
    return [f"Stages. {stages}.", *([VIRTUAL] if is_doubtful else [])]


def has_cold(setups: Sequence[StartSetup]) -> bool:
    return any(setup.cache == COLD for setup in setups)


def heading(setup: StartSetup) -> str:
    mapping = "mmap" if setup.is_mapped else "no mmap"
    return f"{mapping},\n{setup.cache}"


def cells(setups: Sequence[StartSetup]) -> list[list[Cell | str]]:
    """A line for each stage, their sum, and figures beside it."""
    lines: list[list[Cell | str]] = []
    for stage in STAGES:
        times = [with_range(setup, stage) for setup in setups]
        lines.append([stage, *times])
    for name, column in (
        ("first token", "first_token_s"),
        ("second prefill", "second_prefill_s"),
    ):
        lines.append([name, *(with_range(setup, column) for setup in setups)])
    lines.append(["MB from disks", *(amount(setup, "read_bytes", 1e6) for setup in setups)])
    lines.append(["major page faults", *(amount(setup, "n_faults", 1) for setup in setups)])
    return lines


def with_range(setup: StartSetup, column: str) -> Cell:
    """Seconds of the median start, with the range of all starts below."""
    times = setup.starts[column]
    shown = digits(float(setup.median_start[column]))
    if len(times) == 1:
        return Cell(shown)
    return stacked(shown, f"{digits(times.min())}-{digits(times.max())}")


def amount(setup: StartSetup, column: str, unit: float) -> str:
    """A count of the median start; UNKNOWN where the system does not say it."""
    count = setup.median_start[column]
    if count is None or count != count:  # NaN
        return UNKNOWN
    if count == 0:
        return "0"
    return digits(float(count) / unit) if unit > 1 else f"{int(count):,}"


def first_token(table: pd.DataFrame, is_mapped: bool, cache: str) -> str | None:
    """The median time to the first token in words; None without such starts."""
    times = table[(table.is_mapped == is_mapped) & (table.cache == cache)].first_token_s
    return None if times.empty else seconds(times.median())


def answer(line: StartLine, table: pd.DataFrame) -> str:
    """When the first token comes, with mmap if that was measured."""
    if table.empty:
        return ""
    is_mapped = bool(table.is_mapped.any())
    cold = first_token(table, is_mapped, COLD)
    warm = first_token(table, is_mapped, WARM)
    if cold is None:
        return f"From the page cache the first token comes after {warm}."
    wait = figures.disk_wait(table, line.model.n_bytes, is_mapped)
    if wait is None:
        return f"From cold the first token comes after {cold}."
    if not wait.is_clear:
        return (
            f"From cold the first token comes after {cold}, from the page cache after {warm}: the "
            "rounds do not agree that reading the file makes a difference (from beginning to end "
            f"the disk reads its {digits(wait.n_bytes / 1e6)} MB in {seconds(wait.disk_s)})."
        )
    return (
        f"From cold the first token comes after {cold}: {seconds(wait.seconds)} of it waiting for "
        f"the disk, which reads the {digits(wait.n_bytes / 1e6)} MB in order in "
        f"{seconds(wait.disk_s)} ({digits(wait.disk_gbps)} GB/s). From the page cache it comes "
        f"after {warm}."
    )


def sentences(line: StartLine, table: pd.DataFrame, setups: Sequence[StartSetup]) -> list[str]:
    """What mmap changes, how the wait compares with the disk, and what takes the other time."""
    lines = []
    if table.is_mapped.nunique() == 2:
        lines.append(without_mmap(table))
    for is_mapped, name in ((True, "With mmap"), (False, "Without mmap")):
        wait = figures.disk_wait(table, line.model.n_bytes, is_mapped)
        if wait and wait.is_clear:
            lines.append(f"{name}, {compared_with_disk(wait)}")
    warm = [setup for setup in setups if setup.cache == WARM]
    if warm:
        lines.append(largest_stage(warm[0]))
    return lines


def without_mmap(table: pd.DataFrame) -> str:
    warm = first_token(table, False, WARM)
    cold = first_token(table, False, COLD)
    if cold is None:
        return f"Without mmap it comes after {warm} from the page cache."
    return (
        f"Without mmap it comes after {cold} from cold, and after {warm} from the page cache."
    )


def compared_with_disk(wait: DiskWait) -> str:
    """How long the start waits, against the time of a read in order."""
    times = (
        f"a cold start waits {seconds(wait.seconds)} for the disk (range {seconds(wait.low_s)} to "
        f"{seconds(wait.high_s)})"
    )
    share = wait.seconds / wait.disk_s
    if share > SLOWER:
        return f"{times}, longer than a read of the file in order takes."
    if share < AS_FAST:
        saved = percent(1 - share)
        return f"{times}: {saved} of the reading time passes while the weights are placed."
    return f"{times}, as long as a read of the file in order takes: the disk is the limit."


def largest_stage(setup: StartSetup) -> str:
    """The stage that takes most of the time from the page cache, and the first prefill."""
    median = setup.median_start
    stage = max(STAGES, key=lambda name: float(median[name]))
    share = percent(float(median[stage]) / float(median.first_token_s))
    about = OF_STAGES[stage]
    if stage == LOAD:
        about = "placing and repacking the weights"
    first = seconds(float(median[PREFILL]))
    second = seconds(float(median.second_prefill_s))
    return (
        f"From the page cache {share} of the time is the stage {stage} ({about}). The first "
        f"prefill takes {first}, the second {second}."
    )


def warnings(lines: Sequence[StartLine]) -> list[str]:
    """What is left out because the cache was not as it was meant to be."""
    cold = [line for line in lines if line.cache == COLD]
    confirmed = [line for line in cold if line.is_confirmed]
    if cold and not confirmed:
        return [NOT_COLD]
    n_left_out = len([line for line in lines if not line.is_confirmed])
    if n_left_out:
        starts = plural(n_left_out, "start")
        return [f"Left out: {starts} with the page cache in another state than planned."]
    return []


def document(lines: Sequence[StartLine]) -> list[dict[str, object]]:
    """What JSON has of the starts."""
    documents: list[dict[str, object]] = []
    for line in lines:
        documents.append(
            {
                "session": line.session,
                "model": line.model.name,
                "mmap": line.settings.mmap,
                "cache": line.cache,
                "is_confirmed": line.is_confirmed,
                "resident": line.resident,
                "round": line.round,
                "stages": line.stages,
                "first_token_s": line.first_token_s,
                "second_prefill_s": line.second_prefill_s,
                "n_faults": line.n_faults,
                "read_bytes": line.read_bytes,
                "disk_s": line.disk_s,
            }
        )
    return documents
