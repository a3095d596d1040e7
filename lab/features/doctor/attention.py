"""Is llama.cpp's attention slow here? One token attends to N_POSITIONS, with flash attention and
without.

The kernels are timed alone, for the heads of the model and for heads of USUAL_WIDTH, so a model of
any size takes two seconds. With the time of a token after a short prompt they give a step of decode
at that length, with either kind of attention. Beside other programs one thread is timed, which does
not wait for others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lab.core import phases, shell
from lab.core.attention import AttentionLayers, attention_layers
from lab.core.record import Model, Record, Settings
from lab.features.doctor.checks import (
    BUSY,
    FINE,
    LOOK,
    NO_TPOT,
    STOP_PROGRAMS,
    UNKNOWN,
    Check,
    taken_cpu,
)
from lab.models import catalog
from lab.process.wire import ATTENTION, PLAIN_ATTENTION, Probe
from lab.process.worker import Worker
from lab.roofline import probing
from lab.roofline.kernel_rates import best_s
from lab.runner import builds
from lab.runner.cases import Plan
from lab.show.wording import digits, seconds, times

NAME = "attention"
N_POSITIONS = 2000
USUAL_WIDTH = 128  # of heads: that of most models
SLOWER = 1.3  # times: a step that takes so much longer is worth a look
PASS_BYTES = 64 * 2**20  # of caches: a kernel that reads 1 GB/s needs 0.06 s
PROBE_S = 0.1
ROUNDS = 2  # of both kinds, in turns; the best pass counts

AVX512_FP16 = "avx512_fp16"
FP16_STEP = 128
"""Numbers that the F16 kernels of llama.cpp's flash attention handle at a time with AVX512-FP16
(GGML_F16_STEP in ggml-cpu/simd-mappings.h); what is left of a head goes number by number.
"""


@dataclass(frozen=True)
class Times:
    """Seconds of a decode step at N_POSITIONS by the kind of attention, and of both kernels alone
    for one layer with heads of USUAL_WIDTH."""

    flash_s: float
    plain_s: float
    usual_flash_s: float
    usual_plain_s: float


def examine(worker: Worker, plan: Plan, runs: Sequence[Record]) -> Check:
    """The check, from runs after short prompts. LabError if the engine fails."""
    settings = plan.settings
    heads = attention_layers(plan.model)
    if not heads:
        return Check(NAME, None, UNKNOWN, "The lab does not know the heads of this model.")
    if not settings.can_be_plain:
        return Check(NAME, f"flash only, for {settings.type_v} values", FINE)
    tpots_ns = [ns for record in runs if (ns := phases.tpot_ns(record.run)) is not None]
    if not tpots_ns:
        return Check(NAME, None, UNKNOWN, NO_TPOT)
    token_s = median(tpots_ns) / 1e9
    usual = AttentionLayers(1, 8, 2, 0, USUAL_WIDTH, USUAL_WIDTH)
    is_busy = bool(taken_cpu(runs))
    n_threads = 1 if is_busy else settings.n_threads

    def attention_s(groups: Sequence[AttentionLayers], op: str) -> float:
        return sum(_attention_s(worker, plan, group, op, n_threads) for group in groups)

    times_of_step = Times(
        token_s + attention_s(heads, ATTENTION),
        token_s + attention_s(heads, PLAIN_ATTENTION),
        attention_s([usual], ATTENTION),
        attention_s([usual], PLAIN_ATTENTION),
    )
    verdict = check(times_of_step, plan.model, settings, builds.cpu_features())
    if verdict.verdict == FINE and is_busy:
        return dataclasses.replace(verdict, verdict=UNKNOWN, words=BUSY, command=STOP_PROGRAMS)
    return verdict


def _attention_s(
    worker: Worker, plan: Plan, heads: AttentionLayers, op: str, n_threads: int
) -> float:
    """Seconds of attention of one token in all layers of these heads, at best."""
    settings = plan.settings
    device = probing.place_of(plan.machine, plan.model, settings).devices[0]
    n_positions = min(N_POSITIONS, heads.window or N_POSITIONS)
    probe = Probe(
        op,
        settings.cache_types[0].upper(),
        rows=heads.n_head,
        columns=heads.head_dim,
        n_head_kv=heads.n_head_kv,
        n_tokens=1,
        n_bytes=PASS_BYTES,
        n_threads=n_threads if device is None else 1,
        device=device,
        seconds=PROBE_S,
        n_positions=n_positions,
    )
    rates = [worker.probe(probe) for _ in range(ROUNDS)]
    s_per_flop = min(best_s(rate) / rate.flops for rate in rates)
    flops = 2 * (heads.head_dim + heads.head_dim_v) * heads.n_head * n_positions
    return heads.n_layer * flops * s_per_flop


def check(
    step: Times, model: Model, settings: Settings, features: frozenset[str] | None
) -> Check:
    """The verdict; `features` are those of the CPU (None: unknown)."""
    times_of_both = f"flash {seconds(step.flash_s)}, plain {seconds(step.plain_s)}"
    figure = f"{times_of_both} at {N_POSITIONS:,} tokens"
    used = "on" if settings.uses_flash else "off"
    alternative = "off" if settings.uses_flash else "on"
    gain = step.flash_s / step.plain_s
    if not settings.uses_flash:
        gain = 1 / gain
    if gain <= SLOWER:
        return Check(NAME, figure, FINE)
    widths = sorted({heads.head_dim for heads in attention_layers(model) or ()})
    sentence = (
        f"After {N_POSITIONS:,} tokens decode is {times(gain)} as fast with --flash-attn "
        f"{alternative} as with {used}, for this model's heads of {', '.join(map(str, widths))}; "
        f"{_of_usual_heads(step, settings)}"
    )
    if _is_split_badly(widths, settings, features):
        sentence += (
            f" The reason: on this CPU (AVX512-FP16) flash attention handles {FP16_STEP} numbers "
            "of F16 at a time, and what is left of a head number by number."
        )
    arguments: list[object] = ["--prompt-len", N_POSITIONS]
    if catalog.spec_of(model) != catalog.DEFAULT:
        arguments += ["--model", catalog.spec_of(model)]
    sides = (["--flash-attn", used], ["--flash-attn", alternative])
    return Check(NAME, figure, LOOK, sentence, shell.lab("ab", *sides, *arguments))


def _of_usual_heads(step: Times, settings: Settings) -> str:
    """The same comparison of the kernels alone, for heads as most models have them."""
    ratio = step.usual_flash_s / step.usual_plain_s
    if not settings.uses_flash:
        ratio = 1 / ratio
    return f"for heads of {USUAL_WIDTH} attention alone is {digits(ratio)}x as fast."


def _is_split_badly(
    widths: Sequence[int], settings: Settings, features: frozenset[str] | None
) -> bool:
    """Whether flash attention has numbers left over, which it handles one by one."""
    if settings.n_gpu_layers or not settings.uses_flash or AVX512_FP16 not in (features or ()):
        return False
    is_f16 = {kind.lower() for kind in settings.cache_types} == {"f16"}
    return is_f16 and any(width % FP16_STEP for width in widths)
