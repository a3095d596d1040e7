"""Where a curve breaks: two lines fit it, and one does not.

A break is a change of slope (the lines meet) or a jump between two places. It counts if two lines
leave at most half of the errors of one line, if noise does not explain that, if it is large, and if
most single runs show it at the same place.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

FEWEST_SIDE = 3  # places before a break, and after it
N_TRIALS = 120  # places of a change of slope that are tried
LEAST_ERROR = (
    0.02  # root mean square of one line's relative errors, below which no break is told
)
MOST_LEFT = 0.5  # of one line's errors, that two lines leave
EVIDENCE = 10.0  # by which the information criterion (BIC) must prefer two lines
NOISE_FLOOR = 0.002  # relative: a better fit than clocks can tell does not count
LEAST_FACTOR = 1.5  # of the slopes
LEAST_JUMP = 1.2  # of the times
SAME_PLACE = 0.15  # by which runs may differ in the place, relative


@dataclass(frozen=True)
class RunCurve:
    """The times of a run over the work of its steps, which rises, and their positions."""

    works: tuple[float, ...]
    seconds: tuple[float, ...]
    positions: tuple[float, ...]

    def n_past(self, work: float) -> float:
        import numpy as np

        return float(np.interp(work, self.works, self.positions))


@dataclass(frozen=True)
class Break:
    """`factor`: of the slopes, after over before; with `is_jump` of the times at the break."""

    work: float
    low: float
    high: float
    factor: float
    is_jump: bool
    slope_before: float
    slope_after: float


@dataclass(frozen=True)
class _Fit:
    """Two lines: an intercept and a slope before the break, and what both change by after it."""

    low: float
    high: float
    coefficients: tuple[float, ...]
    error: float  # sum of squares

    @property
    def work(self) -> float:
        return (self.low + self.high) / 2


def common(curves: Sequence[RunCurve]) -> Break | None:
    """The break of the median of these runs, if most of the runs, and at least two, show it."""
    works = curves[0].works
    medians = tuple(
        statistics.median(times)
        for times in zip(*(curve.seconds for curve in curves), strict=True)
    )
    pieces = find(works, medians)
    if pieces is None:
        return None
    n_same = 0
    for curve in curves:
        single = find(works, curve.seconds)
        if single is not None and abs(single.work / pieces.work - 1) <= SAME_PLACE:
            n_same += 1
    return pieces if n_same >= 2 and 2 * n_same > len(curves) else None


def find(works: Sequence[float], seconds: Sequence[float]) -> Break | None:
    """The break of a curve, if it has a clear one towards slower steps."""
    import numpy as np

    n = len(works)
    if n < 2 * FEWEST_SIDE:
        return None
    x = np.array(works, dtype=float) / works[-1]
    t = np.array(seconds, dtype=float)
    one_line = _fit([np.ones(n), x], t).error
    if math.sqrt(one_line / n) < LEAST_ERROR:
        return None
    best = min(_kinks(x, t), key=lambda fit: fit.error)
    jump = min(_jumps(x, t), key=lambda fit: fit.error)
    if _criterion(jump.error, 5, n) < _criterion(best.error, 4, n) - EVIDENCE:
        best = jump
    n_terms = len(best.coefficients) + 1
    is_better = _criterion(best.error, n_terms, n) < _criterion(one_line, 2, n) - EVIDENCE
    if not is_better or best.error > MOST_LEFT**2 * one_line:
        return None
    return _judged(best, works[-1])


def _judged(fit: _Fit, scale: float) -> Break | None:
    start, before, *jump, change = fit.coefficients
    after = before + change
    slope_factor = after / before if before > 0 else math.inf
    time_before = start + before * fit.work
    time_after = time_before + (jump[0] + change * fit.work if jump else 0.0)
    time_factor = time_after / time_before if time_before > 0 else math.inf
    is_kink = LEAST_FACTOR <= slope_factor < math.inf and start > 0
    is_jump = bool(jump) and time_factor >= LEAST_JUMP
    if not is_kink and not is_jump:
        return None
    factor = slope_factor if is_kink else time_factor
    slopes = (before / scale, after / scale)
    return Break(
        fit.work * scale, fit.low * scale, fit.high * scale, factor, not is_kink, *slopes
    )


def _kinks(x: np.ndarray, t: np.ndarray) -> Iterator[_Fit]:
    """Lines that meet."""
    import numpy as np

    for place in np.linspace(x[FEWEST_SIDE - 1], x[-FEWEST_SIDE], N_TRIALS):
        fit = _fit([np.ones(len(x)), x, np.maximum(0, x - place)], t)
        yield dataclasses.replace(fit, low=float(place), high=float(place))


def _jumps(x: np.ndarray, t: np.ndarray) -> Iterator[_Fit]:
    """Lines with a jump between two places."""
    import numpy as np

    for index in range(FEWEST_SIDE, len(x) - FEWEST_SIDE + 1):
        is_after = (np.arange(len(x)) >= index).astype(float)
        fit = _fit([np.ones(len(x)), x, is_after, is_after * x], t)
        yield dataclasses.replace(fit, low=float(x[index - 1]), high=float(x[index]))


def _fit(columns: Sequence[np.ndarray], t: np.ndarray) -> _Fit:
    """Least squares of relative errors."""
    import numpy as np

    matrix = np.array(columns).T / t[:, None]
    coefficients = np.linalg.lstsq(matrix, np.ones(len(t)), rcond=None)[0]
    errors = matrix @ coefficients - 1
    return _Fit(0.0, 0.0, tuple(coefficients.tolist()), float(errors @ errors))


def _criterion(error: float, n_terms: int, n: int) -> float:
    """Schwarz's information criterion (1978): smaller is better."""
    return n * math.log(error / n + NOISE_FLOOR**2) + n_terms * math.log(n)
