"""Ten questions on what limits a request, for notebooks/README.md: each figure of an answer is
computed here.

The page embeds them by cog, so a test computes them again.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.features.lessons import lesson
from lab.models import catalog, devices
from lab.show.wording import digits

MACHINE_GBPS = 100.0
GB = 1e9


def questions() -> Iterator[tuple[str, str]]:
    """Each question with its answer."""
    yield from of_one_user()
    yield from of_memory()
    yield from of_several_users()


def of_one_user() -> Iterator[tuple[str, str]]:
    small = catalog.find("llama-3.2-3b")
    assert small.n_bytes is not None
    size_gb = small.n_bytes / GB
    limit_tps = MACHINE_GBPS / size_gb
    yield (
        f"A model of {size_gb:.2f} GB runs on a laptop that reads {MACHINE_GBPS:.0f} "
        "GB/s. How many "
        "tokens/s can one user get at most?",
        f"{digits(limit_tps)}: each token reads all weights, and {MACHINE_GBPS:.0f} / "
        f"{size_gb:.2f} = "
        f"{digits(limit_tps)}.",
    )
    yield (
        "That laptop reaches 70 % of this limit. What do twice as many cores change, for "
        "decode and "
        "for prefill?",
        f"Decode becomes at most 1 / 0.7 = {digits(1 / 0.7)} times as fast: the cores share "
        "one memory. Prefill takes about half of the time if its limit is arithmetic.",
    )
    card = devices.find_device("rtx-3060")
    assert card.tflops is not None
    n_prompt = 10_000
    n_weights = 3.2e9
    prefill_s = 2 * n_weights * n_prompt / card.tflops / 1e12
    decode_s = 20 * small.n_bytes / card.gbps / GB
    yield (
        f"The model has 3.2e9 weights. A card with {card.tflops:g} TFLOP/s and "
        f"{card.gbps:g} GB/s "
        "gets a prompt of 10,000 tokens, and answers with 20. Which of its two figures "
        "matters?",
        "TFLOP/s: at the limits, prefill takes 2 x 3.2e9 x 10,000 FLOPs / "
        f"{card.tflops:g} TFLOP/s = "
        f"{digits(prefill_s)} s (attention comes on top), and decode 20 x {size_gb:.2f} GB / "
        f"{card.gbps:g} GB/s = {digits(decode_s)} s.",
    )
    total_s = 0.4 + 299 * 0.02
    yield (
        "The first token comes after 0.4 s, each further one after 20 ms. How long does "
        "an answer of "
        "300 tokens take, and why may a program show less than 50 tokens/s?",
        f"0.4 + 299 x 0.02 = {digits(total_s)} s. It may divide by the whole time: 300 / "
        f"{digits(total_s)} = {digits(300 / total_s)} tokens/s.",
    )


def of_memory() -> Iterator[tuple[str, str]]:
    model = lesson.shape("llama-3.1-8b", "Q4_0")
    assert model.n_bytes is not None
    token_bytes = lesson.kv_bytes(model)
    cache_gb = 8_192 * token_bytes / GB
    yield (
        f"A model has {model.n_layer} layers and {model.n_head_kv} heads for keys and "
        "values with "
        f"{model.head_dim} numbers each, in F16. How large is the cache of 8,192 tokens?",
        f"2 x {model.n_layer} x {model.n_head_kv} x {model.head_dim} x 2 = "
        f"{token_bytes:,.0f} bytes "
        f"for each token, so {digits(cache_gb)} GB.",
    )
    weights_gb = model.n_bytes / GB
    n_users = int((24 - weights_gb) / cache_gb)
    yield (
        f"Its weights take {weights_gb:.2f} GB. How many such texts fit on a card of 24 "
        "GB, if nothing "
        "else needs memory?",
        f"{n_users}: (24 - {weights_gb:.2f}) / {digits(cache_gb)}.",
    )
    yield (
        "900 of 1,000 prompt tokens are in the cache, and prefill does 400 tokens/s. How "
        "much earlier "
        "does the first token come, and how much faster is decode?",
        f"About {900 / 400:g} s earlier ({1000 / 400:g} s become {100 / 400:g} s). Decode "
        "is not "
        "faster: each token still works through the whole cache.",
    )


def of_several_users() -> Iterator[tuple[str, str]]:
    ridge = 312e12 / 2039e9
    yield (
        "An A100 computes 312e12 FLOP/s and reads 2,039e9 bytes/s. From how many users "
        "on does "
        "arithmetic limit decode with F16, and with 18 bytes for 32 weights?",
        f"Its ridge is {ridge:.0f} FLOPs per byte, and a weight of w bytes gives 2 / w "
        "FLOPs per byte "
        f"and user: from {ridge * 2 / 2:.0f} users, and from {ridge * 18 / 32 / 2:.0f}.",
    )
    yield (
        "A step takes 10 ms for one user and 16 ms for 8. How many tokens/s come out in "
        "total, and for "
        "each? Who pays?",
        f"8 / 16 ms = {8 / 0.016:.0f} in total instead of {1 / 0.01:.0f}, and "
        f"{1 / 0.016:.1f} for "
        "each. Each user pays with slower answers.",
    )
    length = 1 + 0.7 + 0.7**2 + 0.7**3
    yield (
        "Three tokens are drafted for nothing, each right with a probability of 0.7. "
        "Does that pay if "
        "a step of four tokens takes 1.1 times as long as one, and if it takes 3 times "
        "as long?",
        f"A step gives 1 + 0.7 + 0.7^2 + 0.7^3 = {digits(length)} tokens: "
        f"{digits(length / 1.1)} times "
        f"as fast where decode waits for memory, {digits(length / 3)} times where a "
        "kernel limits it.",
    )


def markdown() -> str:
    """The questions as a list in Markdown, each with its answer folded."""
    parts: list[str] = []
    for number, (question, answer) in enumerate(questions(), 1):
        folded = f"<details><summary>Answer</summary>{answer}</details>"
        parts.append(f"{number}. {question}\n\n    {folded}\n\n")
    return "".join(parts)
