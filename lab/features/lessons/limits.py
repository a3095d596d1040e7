"""What rates say: which of three limits a step has, and what users share by the reader's law."""

from __future__ import annotations

from types import SimpleNamespace

from lab.errors import LabError
from lab.roofline import explanation
from lab.show.sweep_laws import Law
from lab.show.wording import digits, times

LETTERS = {
    explanation.TRAFFIC: "memory",
    explanation.ARITHMETIC: "arithmetic",
    explanation.KERNEL: "kernel",
}
"""The answers of the exercise, by what `lab explain` calls the limits."""


def limit_by_rates(gflops: float, gbps: float, best_gflops: float, best_gbps: float) -> str:
    """What limits a step, by its rates and the best ones of its machine: "memory", "arithmetic" or
    "kernel". The rule is that of `lab explain`.

        lesson.limit_by_rates(120, 2, 400, 30)  # "kernel"

    LabError for rates that are not positive.
    """
    rates = (gflops, gbps, best_gflops, best_gbps)
    if not all(rate > 0 for rate in rates):  # also for NaN
        shown = ", ".join(f"{rate:g}" for rate in rates)
        raise LabError(
            f"{shown}: a rate is not above 0.", "Give GFLOP/s and GB/s, each twice."
        )
    row = SimpleNamespace(
        measured_s=1.0,
        least_s=1.0,  # all of the step is its kernels
        attention_s=0.0,
        attention_arithmetic_s=0.0,
        attention_traffic_s=0.0,
        arithmetic_s=gflops / best_gflops,
        traffic_s=gbps / best_gbps,
    )
    return LETTERS[explanation.limit_of(row)]


def users_together(decode: Law, n_users: int, position: int) -> None:
    """Print what users who decode together get by the law t(p) = w + k p, each with his own context
    of `position` tokens: they share w, the weights, and not k p, attention."""
    if n_users < 1 or position < 0:
        raise LabError(
            f"{n_users} users at {position} tokens are not possible.",
            "Give at least one user: lesson.users_together(decode, 4, 2048)",
        )
    attention_s = decode.b * position
    alone_s = decode.a + attention_s
    together_s = decode.a + n_users * attention_s
    if alone_s <= 0:
        print("The law says nothing: its token takes no time.")
        return
    alone_tps = 1 / alone_s
    together_tps = n_users / together_s
    gain = times(together_tps / alone_tps)
    print(
        f"At {position:,} tokens a step takes {digits(1e3 * decode.a)} ms for the weights and "
        f"{digits(1e3 * attention_s)} ms for attention: one user gets {digits(alone_tps)} tokens/s."
    )
    print(
        f"With {n_users} users the weights are read once, and attention takes {n_users} times as "
        f"long: at most {digits(together_tps)} tokens/s together, {gain} as many as one, and "
        f"{digits(together_tps / n_users)} for each."
    )
