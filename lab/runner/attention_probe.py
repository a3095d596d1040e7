"""What attention costs at the longest length of a plan, timed before its first run.

How long a session takes follows from its warm-ups, which are short. Attention grows with the
context, and some of llama.cpp's kernels for it are 20 times as slow as others: so they are timed
alone over the longest context, one token of decode and some tokens of prefill, which needs no
prefill of that context.
"""

from __future__ import annotations

from lab.core.attention import AttentionLayers, attention_layers
from lab.errors import LabError
from lab.process.wire import ATTENTION, PLAIN_ATTENTION, Probe
from lab.process.worker import Worker, WorkerDied
from lab.runner.cases import Plan
from lab.runner.forecast import AttentionRates

SHORTEST = 512  # positions, below which attention matters little
LONGEST = 16_384  # positions of a probe: beyond them its time per position hardly changes
N_TOKENS = 64  # of prefill: from here on llama.cpp takes the kernel of whole tiles
PASS_BYTES = 32 * 2**20  # of caches that a token of decode looks at
SECONDS = 0.1


def time_attention(worker: Worker, plan: Plan) -> AttentionRates | None:
    """The rates of both phases on the CPU; None where they are not needed or cannot be timed.

    The process that timed them is ended: runs are made in a fresh one.
    """
    n_positions = max((case.n_prompt + case.n_gen for case in plan.cases), default=0)
    heads = attention_layers(plan.model)
    if n_positions < SHORTEST or not heads or plan.settings.n_gpu_layers:
        return None
    most_layers = max(heads, key=lambda group: group.n_layer)
    try:
        worker.use(plan.setup)
        prefill_s = _s_per_flop(worker, plan, most_layers, N_TOKENS, n_positions)
        decode_s = _s_per_flop(worker, plan, most_layers, 1, n_positions)
        worker.restart()
    except WorkerDied:  # the session itself will say what is wrong
        worker.restart()
        return None
    except LabError:
        return None
    return AttentionRates(prefill_s, decode_s)


def _s_per_flop(
    worker: Worker, plan: Plan, heads: AttentionLayers, n_tokens: int, n_positions: int
) -> float:
    settings = plan.settings
    n_threads = settings.n_threads if n_tokens == 1 else settings.n_threads_batch
    probe = Probe(
        ATTENTION if settings.uses_flash else PLAIN_ATTENTION,
        settings.cache_types[0].upper(),
        rows=heads.n_head,
        columns=heads.head_dim,
        n_head_kv=heads.n_head_kv,
        n_tokens=n_tokens,
        n_bytes=PASS_BYTES if n_tokens == 1 else 1,
        n_threads=n_threads,
        device=None,
        seconds=SECONDS,
        n_positions=min(n_positions, LONGEST),
    )
    rate = worker.probe(probe)
    return min(rate.times_ns) / 1e9 / rate.flops
