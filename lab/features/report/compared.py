"""The chapter of comparisons: which setup, or which session of one setup, is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.show import comparison, table, text_comparison
from lab.show.cells import listed
from lab.show.comparison import Group
from lab.show.section import Section, tabled
from lab.show.session_spread import Spread

MANY = 3  # with more setups than this, only setups of the same model are compared
Key = tuple[str, str, int]  # the model, the case, the length of the prompt


@dataclass(frozen=True)
class Compared:
    """The chapter, None without anything to compare. `is_whole`: all setups are compared with each
    other."""

    chapter: Section | None
    is_whole: bool


@dataclass
class Cluster:
    """Setups that are compared with each other: they have a key of the first one."""

    keys: set[Key]
    groups: list[Group] = field(default_factory=list)


def compare(
    records: Sequence[Record | RequestRecord],
    at_least: float,
    spreads: Mapping[tuple[object, str], Spread],
) -> Compared:
    """Compare setups of the same model or, of few setups, all that have a length in common."""
    try:
        groups = comparison.groups(records)
    except LabError:  # there is only one
        return Compared(None, False)
    clusters = clusters_of(groups)
    is_whole = len(clusters) == 1
    several = [cluster.groups for cluster in clusters if len(cluster.groups) > 1]
    n_alone = len(clusters) - len(several)
    sentences: list[str] = []
    parts: list[Section] = []
    for compared_groups in several:
        if not is_whole:
            compared_groups = relabelled(compared_groups)
        comparisons = comparison.compare_groups(compared_groups, at_least, spreads)
        sentences += text_comparison.answers(comparisons)
        parts.append(part(compared_groups, text_comparison.sections(comparisons)))
        how = text_comparison.how_compared(compared_groups, comparisons, at_least)
        parts.append(Section(sentences=how))
    chapter = Section(
        "Which is faster, and how certain is that?",
        name="compared",
        words=left_out(n_alone, len(groups)),
        sentences=sentences,
        parts=parts,
    )
    return Compared(chapter, is_whole and n_alone == 0)


def clusters_of(groups: Sequence[Group]) -> list[Cluster]:
    by_model = len(groups) > MANY
    clusters: list[Cluster] = []
    for group in groups:
        keys = keys_of(group, by_model)
        cluster = next((cluster for cluster in clusters if cluster.keys & keys), None)
        if cluster is None:
            cluster = Cluster(keys)
            clusters.append(cluster)
        cluster.groups.append(group)
    return clusters


def keys_of(group: Group, by_model: bool) -> set[Key]:
    rows = group.rows
    model = rows.model.iloc[0].split(" ")[0] if by_model else ""
    cases = rows.case.fillna("")
    return {
        (model, case, n_prompt) for case, n_prompt in zip(cases, rows.n_prompt, strict=True)
    }


def relabelled(groups: Sequence[Group]) -> list[Group]:
    """The same groups, labelled by the differences among them."""
    import pandas as pd

    rows = pd.concat([group.rows for group in groups])
    return [Group(label, rows_of_setup) for label, rows_of_setup in table.setups(rows)]


def part(groups: Sequence[Group], against_base: Sequence[Section]) -> Section:
    """A table of the differences, and below it each setup against the first."""
    names = [group.label for group in groups]
    base = [f"The base is {names[0]}."]
    differences = text_comparison.differences(groups)
    if not differences:
        return Section(words=base, parts=against_base)
    rows = [[name, *values] for name, values in differences.items()]
    return Section(
        "Differences",
        words=base,
        **tabled(listed(["", *names]), rows, keep_all=True),
        parts=against_base,
    )


def left_out(n_alone: int, n_setups: int) -> list[str]:
    """A sentence on setups that are compared with none."""
    if n_alone == 0:
        return []
    rest = f"{n_alone} of {n_setups} setups have no length in common with another setup"
    if n_alone == 1:
        return [f"{rest} of their model, so it is not compared."]
    return [f"{rest} of their model, so they are not compared."]
