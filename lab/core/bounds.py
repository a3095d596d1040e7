"""Types of the fields of a results file's lines, with the range that each may have.

Files may come from anyone, and figures are computed from them: the ranges are far beyond what a
machine can do, and small enough that arithmetic neither overflows nor takes gigabytes.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST_LETTERS = 10_000

Text = Annotated[str, Meta(max_length=MOST_LETTERS)]
Whole = Annotated[int, Meta(ge=-(10**15), le=10**15)]
Number = Annotated[float, Meta(ge=-1e15, le=1e15)]

Count = Annotated[int, Meta(ge=0, le=10**7)]  # tokens, runs, steps
Choice = Annotated[int, Meta(ge=-1, le=10**6)]  # of threads or layers; -1: llama.cpp chooses
Context = Annotated[int, Meta(ge=0, le=2**24)]
Batch = Annotated[int, Meta(ge=1, le=2**30)]
Sequences = Annotated[int, Meta(ge=1, le=10**7)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

Layers = Annotated[int, Meta(ge=0, le=2000)]
Parts = Annotated[int, Meta(ge=0, le=10**5)]  # heads, experts, cores, slots
Width = Annotated[int, Meta(ge=0, le=10**9)]  # of a layer, of the vocabulary
Extent = Annotated[int, Meta(ge=0, le=10**11)]  # rows and columns of a matrix
Size = Annotated[int, Meta(ge=0, le=10**16)]  # bytes, parameters
Amount = Annotated[float, Meta(ge=0, le=1e16)]  # bytes, joules
Nanoseconds = Annotated[int, Meta(ge=0, le=10**15)]
Duration = Annotated[int, Meta(ge=1, le=10**15)]  # in nanoseconds
Operations = Annotated[int, Meta(ge=0, le=10**18)]
Work = Annotated[float, Meta(ge=0, le=1e21)]  # operations
