"""The answer of a search in sentences."""

from __future__ import annotations

from lab.core.lists import join_and, plural
from lab.core.stats import Ratio
from lab.features.bisect.figures import Bisected, NeighbourPair, pairs, slow_figures
from lab.features.bisect.search import (
    AGAIN,
    ENDS,
    FASTER,
    LOOKS,
    SAME,
    SLOWER,
    UNCLEAR,
    Halving,
)
from lab.show.wording import percent


def ratio_text(ratio: Ratio | None) -> str:
    """Such as `1.10 (1.07 to 1.13)`."""
    if ratio is None:
        return "-"
    return f"{ratio.estimate:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def sentences(result: Bisected) -> list[str]:
    """The answer, then what it does not tell."""
    answers = on_ends(result)
    for pair in pairs(result):
        answers += on_pair(result, pair)
    answers += on_again(result)
    return answers


def ends_names(result: Bisected) -> str:
    return f"from {result.label(0)} to {result.label(result.search.bad)}"


def ends_ratios(result: Bisected, figures: list[str]) -> str:
    """The ratios of the bad end to the good one, figure by figure."""
    search = result.search
    return ", ".join(
        f"{figure} {ratio_text(search.ends_ratio(search.bad, figure))}" for figure in figures
    )


def on_ends(result: Bisected) -> list[str]:
    """Whether the bad end is slower at all."""
    search = result.search
    if not search.ends:
        return [unfinished_ends(result)]
    of_verdict: dict[str, list[str]] = {}
    for figure, verdict in search.ends.items():
        of_verdict.setdefault(verdict, []).append(figure)
    names = ends_names(result)
    lines = []
    if SLOWER in of_verdict:
        ratios = ends_ratios(result, of_verdict[SLOWER])
        lines.append(f"Slower {names}, times as long: {ratios}.")
    if SAME in of_verdict:
        ratios = ends_ratios(result, of_verdict[SAME])
        size = percent(result.asked.at_least)
        lines.append(
            f"No regression {names}: {ratios}; a slowdown of {size} would have been seen."
        )
    if FASTER in of_verdict:
        ratios = ends_ratios(result, of_verdict[FASTER])
        lines.append(f"Faster {names}, times as long: {ratios}.")
    if UNCLEAR in of_verdict:
        ratios = ends_ratios(result, of_verdict[UNCLEAR])
        lines.append(f"Not clear after {LOOKS[-1]} blocks {names}: {ratios}.")
    return lines


def unfinished_ends(result: Bisected) -> str:
    search = result.search
    n_blocks = len([block for block in search.blocks if block.stage == ENDS])
    if n_blocks < LOOKS[0]:
        return (
            f"Not decided {ends_names(result)}: {plural(n_blocks, 'block')} measured, and a first "
            f"interval needs {LOOKS[0]}. More time is needed: --budget."
        )
    ratios = ends_ratios(result, list(search.figures))
    return (
        f"Not decided {ends_names(result)}: {ratios}, after {plural(n_blocks, 'block')}. More time "
        "is needed: --budget."
    )


def on_pair(result: Bisected, pair: NeighbourPair) -> list[str]:
    """Where figures became slower, and how sure that is."""
    search = result.search
    fast = result.label(pair.fast)
    slow = result.label(pair.slow)
    figures = join_and(pair.figures)
    halving = search.halvings[pair.figures[0]]
    untested = [place for place in halving.between if place not in search.dropped]
    if untested:
        n_untested = plural(len(untested), "build")
        return [
            f"{figures.capitalize()} became slower between {fast} and {slow}. The search ended "
            f"before {n_untested} between them could be judged: --budget."
        ]
    where = place_of(result, pair)
    lines = []
    for figure in pair.figures:
        ratio = search.proven.get(figure)
        if ratio is not None:
            slowdown = proven_slowdown(result, pair, figure, ratio)
            lines.append(f"{slowdown}, from new blocks that compare the two.")
            lines += on_rest(result, figure, halving, ratio)
        elif figure in search.unproven:
            lines.append(
                f"The search for {figure} ended at {fast} and {slow}, but new blocks do not show "
                "that they differ. The slowdown may come in several small steps."
            )
        else:
            lines.append(
                f"{figure.capitalize()} became slower {where}. The search ended before new blocks "
                "confirmed it: --budget."
            )
    return lines + on_left_out(result, pair)


def place_of(result: Bisected, pair: NeighbourPair) -> str:
    """Where something changed, such as `in b4`."""
    fast = result.label(pair.fast)
    slow = result.label(pair.slow)
    return f"in {slow}" if pair.slow == pair.fast + 1 else f"between {fast} and {slow}"


def proven_slowdown(result: Bisected, pair: NeighbourPair, figure: str, ratio: Ratio) -> str:
    """A slowdown that new blocks confirmed, without a full stop."""
    return (
        f"{figure.capitalize()} became slower {place_of(result, pair)}: {ratio_text(ratio)} times "
        f"as long as in {result.label(pair.fast)}"
    )


def on_rest(result: Bisected, figure: str, halving: Halving, ratio: Ratio) -> list[str]:
    """That the pair explains only a part of the slowdown."""
    of_ends = result.search.ends_ratio(result.search.bad, figure)
    if of_ends is None or ratio.high >= of_ends.low:
        return []
    return [
        f"That is a part of it: {figure} takes {ratio_text(of_ends)} times as long "
        f"{ends_names(result)}. "
        f"To search the rest, name {result.label(halving.slow)} as --good, or "
        f"{result.label(halving.fast)} as --bad."
    ]


def on_left_out(result: Bisected, pair: NeighbourPair) -> list[str]:
    """The builds between the neighbours, and why they have no verdict."""
    search = result.search
    reasons = []
    for place in range(pair.fast + 1, pair.slow):
        label = result.label(place)
        if place in search.dropped:
            reasons.append(f"{label} does not run ({search.dropped[place].rstrip('.')})")
        else:
            reasons.append(f"{label} is not clear after {LOOKS[-1]} blocks")
    if not reasons:
        return []
    return [f"Left out between them: {'; '.join(reasons)}."]


def on_again(result: Bisected) -> list[str]:
    """The A/A comparison of the good end."""
    search = result.search
    differing = []
    for figure in search.figures:
        ratio = search.ends_ratio(AGAIN, figure)
        if ratio is not None and not ratio.low <= 1 <= ratio.high:
            differing.append(f"{figure} {ratio_text(ratio)}")
    if differing:
        return [
            f"{result.label(0)} differs from itself: {', '.join(differing)}. The machine changed "
            "its speed with the order of the runs, so nothing else here is certain."
        ]
    return []


def answer(result: Bisected) -> str:
    """The first thing to say: the pair, or what is known of the ends."""
    for pair in pairs(result):
        return on_pair(result, pair)[0]
    return on_ends(result)[0]


def finding(result: Bisected) -> str:
    """The answer in a line, without a full stop."""
    proven = result.search.proven
    for pair in pairs(result):
        for figure in pair.figures:
            ratio = proven.get(figure)
            if ratio is not None:
                return proven_slowdown(result, pair, figure, ratio)
    return answer(result).rstrip(".")


def is_found(result: Bisected) -> bool:
    """Whether a pair of builds is proven for every figure that became slower."""
    slow = slow_figures(result)
    return bool(slow) and all(figure in result.search.proven for figure in slow)
