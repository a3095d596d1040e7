"""The time left of a run in flight: its forecast, corrected by the pace that the run shows."""

from __future__ import annotations

from lab.core import stats
from lab.process.wire import Progress

FEWEST_POINTS = 4  # of a prefill, for a curve through them
PRIOR_TOKENS = 4  # the forecast of a decode counts as much as this number of tokens
OVERDUE = 2.0  # a step that takes this multiple of what its pace says is slower than its pace
SURE_S = 5.0  # a run that takes so long says how slow the others will be


class RunInFlight:
    """Tells the seconds left of a run, from its progress.

    `seconds` of prefill and decode were forecast. A prefill of n of its tokens takes the share
    `linear` x + (1 - `linear`) x^2 of the prefill's time, with x = n / n_prefill: attention makes
    later tokens slower.
    """

    def __init__(
        self, seconds: tuple[float, float], n_prefill: int, n_gen: int, linear: float = 1.0
    ) -> None:
        self.prefill_s, self.decode_s = seconds
        self.n_prefill = max(1, n_prefill)
        self.n_gen = max(1, n_gen)
        self.linear = linear
        self.points: list[tuple[int, float]] = []  # tokens prefilled, and when
        self.n_generated = 0
        self.generated_at_s = 0.0
        self.prefill_end_s: float | None = None  # of a prefill that comes before all decode

    def rest_s(self, progress: Progress, elapsed_s: float) -> float:
        """The seconds left of the run."""
        self._see(progress, elapsed_s)
        return max(0.0, self._total_s(elapsed_s) - elapsed_s)

    def slowness(self, elapsed_s: float) -> float:
        """How many times as long as forecast it takes; near 1 while it is short."""
        forecast_s = self.prefill_s + self.decode_s
        if forecast_s <= 0:
            return 1.0
        trust = min(1.0, elapsed_s / SURE_S)
        return 1 + trust * (self._total_s(elapsed_s) / forecast_s - 1)

    def _see(self, progress: Progress, elapsed_s: float) -> None:
        n_prefilled = min(self.n_prefill, progress.n_prefilled)
        if n_prefilled > self._n_prefilled:
            self.points.append((n_prefilled, elapsed_s))
            if n_prefilled == self.n_prefill and not self.n_generated:
                self.prefill_end_s = elapsed_s
        n_generated = min(self.n_gen, len(progress.token_ids))
        if n_generated > self.n_generated:
            self.n_generated = n_generated
            self.generated_at_s = elapsed_s

    @property
    def _n_prefilled(self) -> int:
        return self.points[-1][0] if self.points else 0

    def _total_s(self, elapsed_s: float) -> float:
        if self.prefill_end_s is not None:
            return self.prefill_end_s + self._decode_s(elapsed_s, self.prefill_end_s)
        if self.n_generated:
            return self._interleaved_s(elapsed_s)
        prefill_s = self._prefill_s(elapsed_s)
        if self.prefill_s <= 0:
            return prefill_s + self.decode_s
        return prefill_s * (1 + self.decode_s / self.prefill_s)

    def _prefill_s(self, elapsed_s: float) -> float:
        """The whole prefill: as forecast, as its pace says, and later as its curve says."""
        if not self.points:
            return max(self.prefill_s, elapsed_s)
        n, at_s = self.points[-1]
        n_points = len(self.points)
        share = self._share(n)
        at_this_pace_s = (self.prefill_s + n_points * at_s / share) / (1 + n_points)
        left_s = (1 - share) * at_this_pace_s
        if n_points >= FEWEST_POINTS:
            trust = min(1.0, 2 * n / self.n_prefill)
            left_s += trust * (self._left_by_curve_s(n) - left_s)
        n_before = self.points[-2][0] if n_points > 1 else 0
        next_share = self._share(min(self.n_prefill, 2 * n - n_before))
        step_s = (next_share - share) * at_this_pace_s
        if elapsed_s - at_s > OVERDUE * step_s:
            return max(at_s + left_s, elapsed_s / next_share)
        return at_s + left_s

    def _share(self, n: int) -> float:
        x = n / self.n_prefill
        return self.linear * x + (1 - self.linear) * x * x

    def _left_by_curve_s(self, n: int) -> float:
        """The seconds after n tokens, by a line and a parabola through the later points."""
        points = self.points[len(self.points) // 3 :]
        shares = [n / self.n_prefill for n, _ in points]
        squares = [share * share for share in shares]
        per_share, per_square = stats.fit([shares, squares], [at_s for _, at_s in points])
        x = n / self.n_prefill
        return per_share * (1 - x) + per_square * (1 - x * x)

    def _decode_s(self, elapsed_s: float, began_s: float) -> float:
        """The whole decode: as forecast and as slow as the prefill, then by its own pace."""
        forecast_s = self.decode_s
        if self.prefill_s > 0:
            forecast_s *= began_s / self.prefill_s
        n = self.n_generated
        if not n:
            return max(forecast_s, elapsed_s - began_s)
        spent_s = self.generated_at_s - began_s
        token_s = (PRIOR_TOKENS * forecast_s / self.n_gen + spent_s) / (PRIOR_TOKENS + n)
        waited_s = elapsed_s - self.generated_at_s
        if n < self.n_gen and waited_s > OVERDUE * token_s:
            token_s = (elapsed_s - began_s) / (n + 1)
        return spent_s + token_s * (self.n_gen - n)

    def _interleaved_s(self, elapsed_s: float) -> float:
        """The whole run, if prefill and decode take turns."""
        done_s = self.prefill_s * self._share(self._n_prefilled)
        done_s += self.decode_s * self.n_generated / self.n_gen
        forecast_s = self.prefill_s + self.decode_s
        if done_s <= 0:
            return max(forecast_s, elapsed_s)
        seen_s = max(self.generated_at_s, self.points[-1][1] if self.points else 0.0)
        share = done_s / forecast_s
        by_pace_s = seen_s / share
        return max(forecast_s + share * (by_pace_s - forecast_s), by_pace_s, elapsed_s)
