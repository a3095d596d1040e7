"""A script of a user with types, which is never run: mypy --strict and pyright check it.

Each `type: ignore` is an error that a checker must find.
"""

from __future__ import annotations

from pathlib import Path

import lab


def main() -> None:
    records = lab.measure("8,16", gen=4, threads=2, flash_attn=True, cache_type_k="q8_0")
    first_status: str = records[0].run.status
    print(first_status, records.records[-1].model.name, records[-1].settings.n_threads)
    lab.measure(8)
    lab.measure([8, 16], until="2%", budget="10min", watch=False)
    lab.measure(range(8, 64, 8), out=Path("results"))
    requests = lab.measure(8, url="http://127.0.0.1:8080/v1", api="chat")
    print(requests[0].endpoint.url)
    both = records + lab.batch("1,4", 256)
    print(both.runs.tpot_ms.median(), both.steps.itl_ms.max(), both.summary)
    trial = lab.ab([{"threads": 1}, {"threads": 2}], [8], gen=4, model="smollm2-135m")
    for comparison in lab.compare(trial, "results", base="threads 1", at_least="2%"):
        for row in comparison.rows:
            print(row.n_prompt, row.figure, row.words)
    shortest_s, longest_s = lab.predict(1000, 200, "llama-3.2-3b", "rtx-4090")[0].tpot_s
    print(
        shortest_s, longest_s, lab.read("results").skipped, lab.runs(Path("results")).columns
    )
    lab.plot_decode(records, ceilings=lab.ceilings())
    page: Path = lab.report("page.html", records)
    print(page, lab.quant("a.gguf", Path("b.gguf"), gen=8), records.plot())

    lab.measure("8", thread=2)  # type: ignore[call-overload]
    lab.measure("8", flash_attn="maybe")  # type: ignore[call-overload]
    lab.sweep(64, temp=0.5)  # type: ignore[call-arg]
    lab.compare(records, at_least=[1])  # type: ignore[arg-type]
    lab.nonsense()  # type: ignore[attr-defined]
