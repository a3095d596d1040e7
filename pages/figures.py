"""Sentences and tables of pages whose figures are computed from the samples and the formulas."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import cog

import lab
from lab.core.record import Record
from lab.roofline import probing
from lab.show import sweep_laws
from tests.support.command import run_lab

ROOT = Path(__file__).parent.parent
EPYC = "smollm2-135m-amd-epyc"
PUBLISHED = {
    "rtx-4090": ("RTX 4090", 334.7),
    "rtx-3080-ti": ("RTX 3080 Ti", 263),
    "rtx-3060": ("RTX 3060", 123),
    "m4": ("Apple M4", 41),
    "ryzen-ai-max-395": ("Ryzen AI Max+ 395", 88),
    "gb10": ("GB10", 98),
    "raspberry-pi-5": ("Raspberry Pi 5", 4.9),
}
"""Tokens/s from geerlingguy/ai-benchmarks."""

A100_GBPS = 2039
A100_FLOPS = 312e12
Q4_0_WEIGHT_BYTES = 18 / 32


def write(paragraph: str) -> None:
    cog.outl()
    cog.outl(textwrap.fill(" ".join(paragraph.split()), 120, break_on_hyphens=False))
    cog.outl()


def sample(name: str) -> list[Record]:
    return list(lab.read([ROOT / "results" / f"sample-{name}.jsonl"]).records)


def tpot_by_length(records: list[Record]) -> Any:
    """Milliseconds a token by prompt length."""
    return lab.summary(lab.runs(records)).set_index("n_prompt").tpot_ms


def shares() -> None:
    """README.md: which phase takes the time."""
    rows = lab.summary(lab.runs(sample(EPYC))).set_index("n_prompt")
    decode = 100 * (1 - rows.prefill_share[10])
    prefill = 100 * rows.prefill_share[10000]
    write(f"""After a prompt of 10 tokens, decode of 200 tokens takes {decode:.0f} % of the time;
        after a prompt of 10,000 tokens, prefill takes {prefill:.0f} %.""")


def sweep() -> None:
    """docs/measure.md: what a token costs."""
    rows = lab.summary(lab.runs(sample(f"sweep-{EPYC}")))
    prefill = sweep_laws.prefill_law(rows)
    decode = sweep_laws.decode_law(rows)
    assert prefill
    assert prefill.c
    assert decode
    write(f"""In [this sample](../results/sample-sweep-{EPYC}.jsonl), prefill of a token costs
        {1e3 * prefill.b:.1f} ms, and {2e6 * prefill.c:.2f} ms more for every 1,000 tokens before
        it. A generated token costs {1e3 * decode.a:.1f} ms, and {1e6 * decode.b:.1f} ms more for
        every 1,000 positions. Models whose cache cannot be cut (recurrent layers, sliding windows)
        are refused.""")


def roofline() -> None:
    """docs/limits.md: what prefill reaches of its ceiling."""
    file = f"results/sample-{EPYC}.jsonl"
    contents = lab.read([ROOT / file])
    (best,) = contents.ceilings
    rows = lab.explain(contents.records, best)
    (row,) = rows[(rows.phase == "prefill") & (rows.n_prompt == 1000)].itertuples()
    ceilings = set()
    for rate in best.rates:
        if (rate.op, rate.type, rate.n_tokens, rate.n_threads) == ("mul_mat", "Q4_0", 512, 2):
            ceilings.add(probing.gflops(rate))
    (ceiling,) = ceilings
    write(f"""The roofline is the highest possible rate of arithmetic at each number of FLOPs per
        byte. [Q4_1](settings.md#names) has a slow kernel on this CPU: prefill of 1,000 tokens
        reaches {100 * row.of_ceiling:.0f} % of what its kernels reach alone ({row.gflops:.0f}
        GFLOP/s with attention), where Q4_0 has a ceiling of {ceiling:.0f}. (The ceilings
        are in [the same file](../{file}) as the measurement.)""")


def shared_heads() -> None:
    """results/README.md: Llama 3.2 beside Phi-3."""
    llama = sample("synthetic-llama-3.2-3b-q4_0-amd-epyc")
    phi = sample("synthetic-phi-3-mini-q4_0-amd-epyc")
    llama_ms = tpot_by_length(llama)
    phi_ms = tpot_by_length(phi)
    phi_gb = (phi[0].model.n_bytes or 0) / 1e9
    llama_gb = (llama[0].model.n_bytes or 0) / 1e9
    write(f"""The two samples with random weights come from **another machine** than all others
        (A, which also made the conversation): compare them only with each other. After 10 tokens
        Phi-3 mini decodes a token in {phi_ms[10]:.0f} ms and Llama 3.2 3B in {llama_ms[10]:.0f} ms,
        in proportion to their sizes ({phi_gb:.2f} and {llama_gb:.2f} GB). After 2,048 tokens it is
        {phi_ms[2048]:.0f} ms against {llama_ms[2048]:.0f} ms: Phi-3 mini has keys and values for
        all its 32 heads and reads 3.4 times as many bytes per position as Llama, whose 24 heads
        share 8.""")


def predicted(*asked: object) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(run_lab("predict", *asked, "--json")[1])["rows"]
    return rows


def datasheets() -> None:
    """results/README.md: published rates beside the predicted ranges."""
    cog.outl()
    cog.outl("| device | published | predicted | published, of the bandwidth limit |")
    cog.outl("| --- | --- | --- | --- |")
    for device, (name, published_tps) in PUBLISHED.items():
        (row,) = predicted("-m", "llama-3.2-3b:Q4_K_M", "-p", 1, "-n", 2, "-d", device)
        low, high = (f"{1 / seconds:.3g}" for seconds in row["tpot_s"][::-1])
        reached = 100 * published_tps * row["tpot_limit_s"]
        cog.outl(f"| {name} | {published_tps:g} | {low} to {high} | {reached:.0f} % |")


def share(prefill_s: float, tpot_s: float) -> str:
    """The share of prefill beside 199 steps of decode."""
    return f"{100 * prefill_s / (prefill_s + 199 * tpot_s):.0f} %"


def quoted() -> None:
    """results/README.md: figures that others quote, computed by the lab's formulas."""
    a100 = ("-m", "llama-2-7b:F16", "-d", "a100-80gb", "-n", 200, "-p")
    empty, short, long = predicted(*a100, "1,1000,100000")
    token_s = empty["tpot_limit_s"]
    read_gb = A100_GBPS * token_s
    cache_gb = A100_GBPS * (long["tpot_limit_s"] - token_s)
    ridge = A100_FLOPS / 1e9 / A100_GBPS
    bandwidths = " / ".join(f"{gbps / 35:.1f}" for gbps in (1008, 936, A100_GBPS, 800))
    short_s = short["prefill_limit_s"]
    at_limits = share(short_s, short["tpot_limit_s"])
    at_30_percent = share(short_s / 0.3, short["tpot_limit_s"])
    long_share = share(long["prefill_limit_s"], long["tpot_limit_s"])
    without_cache = share(long["prefill_limit_s"], token_s)
    rows = {
        "quoted": "computed",
        "---": "---",
        "35 GB of weights at 1,008 / 936 / 2,039 / 800 GB/s: 29 / 27 / 58 / 23 tokens/s": (
            f"bandwidth over bytes: {bandwidths}"
        ),
        "a 7B in F16 on an A100: at most about 145 tokens/s": (
            "145 is 7.0e9 x 2 bytes at 2,039 GB/s. "
            f"Llama 2 7B reads {read_gb:.1f} GB a token: {1 / token_s:.0f}."
        ),
        "1,000 tokens in and 200 out of a 7B: about 10 % prefill": (
            f"{at_limits} if both ran at the A100's limits; {at_30_percent} if prefill reached "
            "30 % of its peak and decode all of its bandwidth"
        ),
        "100,000 in and 200 out: about 80 %": (
            f"{long_share} at the limits, since each token also reads {cache_gb:.0f} GB of cache; "
            f"{without_cache} if that is left out"
        ),
        "decode turns compute-bound at a large batch": (
            f"at ridge x bytes per weight / 2: on an A100 {ridge:.0f} sequences in F16, "
            f"{ridge * Q4_0_WEIGHT_BYTES / 2:.0f} in Q4_0"
        ),
        '"the A100\'s ridge is 312 FLOPs per byte"': (
            f"312 is its peak in TFLOP/s; the ridge is 312e12 / 2.04e12 = {ridge:.0f}"
        ),
    }
    cog.outl()
    for quote, computed in rows.items():
        cog.outl(f"| {quote} | {computed} |")
