"""The data: a run is a list of steps, and a step is one call of `llama_decode`.

Every experiment of the lab is a table of steps, and a results file is a list of runs: one JSON line per
run, each line complete in itself (machine, model, settings, steps). So `cat a.jsonl b.jsonl` is a valid
results file, a crash loses at most the run in flight, and rates are never stored, only derived.

All `_ns` stamps come from one monotonic clock and count from the run's first `start_ns`.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any

from lab.core.matrix import Matrix
from lab.core.noise import Noise

T = typing.TypeVar("T")

SCHEMA = 1
"""Version of a line. History: 1 (lab 0.1.0) is the first."""

PREFILL = "prefill"
DECODE = "decode"
OK = "ok"
FAILED = "failed"  # the engine said no: out of memory, a refused setting
CRASHED = "crashed"  # the engine's process died


@dataclass(frozen=True)
class Model:
    """A model file and its shape. What the file does not say is None."""

    name: str
    source: str  # embedded, hub, file, synthetic (random weights), requantized
    repo: str | None
    file: str
    revision: str | None
    sha256: str | None
    n_bytes: int | None
    quantization: str | None
    arch: str | None
    n_layer: int | None
    n_embd: int | None
    n_head: int | None
    n_head_kv: int | None
    head_dim: int | None
    n_ff: int | None
    n_vocab: int | None
    n_ctx_train: int | None
    tied_embeddings: bool | None
    tensor_bytes: dict[str, int]  # bytes by tensor type
    embedding_bytes: int | None = None  # of the token embedding table
    output_bytes: int | None = None  # of the output matrix, where it is not the embedding table
    embedding_type: str | None = None
    output_type: str | None = None
    n_expert: int | None = None
    n_params: int | None = None
    description: str | None = None  # llama.cpp's own
    n_expert_used: int | None = None  # experts that a token goes through
    matrices: tuple[Matrix, ...] | None = None  # from the table of tensors; None in records of older versions
    windows: tuple[int, ...] | None = None  # of each layer: positions that a token sees (0: all); None: all see all
    heads: tuple[int, ...] | None = None  # of each layer, where they differ
    heads_kv: tuple[int, ...] | None = None  # of each layer, where they differ
    head_dim_v: int | None = None  # of values, where it is not that of keys
    n_ff_expert: int | None = None  # width of one expert
    uncounted: str | None = None  # what of this architecture the lab's arithmetic does not know


@dataclass(frozen=True)
class Device:
    """A device that the llama.cpp build can compute on. `type` is cpu, gpu, igpu or accel."""

    name: str
    description: str
    type: str
    memory_bytes: int | None


@dataclass(frozen=True)
class Machine:
    """Where a run happened. What is not known (of imported results: most) is None, never a guess."""

    cpu: str | None
    n_cores_physical: int | None
    n_cores_usable: int | None
    ram_bytes: int | None
    os: str | None
    python: str | None
    llama_cpp_python: str | None
    llama_cpp_commit: str | None
    system_info: str | None
    devices: tuple[Device, ...]
    virtual: bool | None
    power: str | None  # mains, battery


@dataclass(frozen=True)
class Settings:
    """Everything that was chosen about how llama.cpp runs. llama-bench's defaults are the lab's."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_threads_batch: int
    n_gpu_layers: int
    flash_attn: str  # asked: on, off, auto
    flash_attn_resolved: str | None  # what llama.cpp then did: on, off
    type_k: str
    type_v: str
    prompt: str  # text, random, or a file's name
    prompt_sha256: str | None
    seed: int | None


@dataclass(frozen=True)
class Steps:
    """One row per call of `llama_decode`, as columns of equal length.

    `n_past` is the position: tokens in the context before the step. `start_ns` is taken just before
    `llama_decode`, `ready_ns` after `llama_synchronize`, `end_ns` after the next token is chosen.
    """

    kind: tuple[str, ...] = ()
    n_tokens: tuple[int, ...] = ()
    n_past: tuple[int, ...] = ()
    start_ns: tuple[int, ...] = ()
    ready_ns: tuple[int, ...] = ()
    end_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in dataclasses.fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of steps differ in length: {lengths}")


@dataclass(frozen=True)
class Totals:
    """What another tool tells of a run: its times as a whole, where the lab has steps."""

    prefill_ns: int | None
    decode_ns: int | None  # of n_gen - 1 decode steps, without choosing tokens


@dataclass(frozen=True)
class Run:
    """One prompt prefilled and n_gen tokens generated: the replicate of every experiment."""

    n_prompt: int
    n_gen: int
    repeat: int
    warmup: bool
    started_at: str
    status: str
    error: str | None
    steps: Steps
    token_ids: tuple[int, ...]  # the n_gen tokens that were chosen
    prompt_offset: int | None  # where in the tokenised text the prompt began
    end_of_generation_at: int | None  # index of the first end-of-generation token; it stops nothing
    noise: Noise | None
    every: int | None = None  # a sweep: n_gen tokens were generated and forgotten after each so many of the prompt
    block: int | None = None  # of `lab ab`: runs of one block were measured side by side
    variant: str | None = None  # of `lab ab`: which of the compared settings, in the user's words
    totals: Totals | None = None  # imported: there are no steps


@dataclass(frozen=True)
class Record:
    """One line of a results file."""

    session: str
    machine: Machine
    model: Model
    settings: Settings
    run: Run
    schema: int = SCHEMA


@dataclass(frozen=True)
class Rate:
    """One kernel at one size, timed: what passed through it in a pass, and how long each pass took."""

    op: str  # mul_mat, attention, read
    type: str  # of the weights, or of the cache
    buffer: str  # the kind of memory: CPU, CPU_REPACK, CUDA0
    rows: int
    columns: int
    n_tokens: int
    n_threads: int
    n_bytes: int
    flops: int
    times_ns: tuple[int, ...]
    n_head_kv: int | None = None  # of attention
    n_positions: int | None = None  # of attention: how long the context is; None in files of older versions
    n_expert: int | None = None  # of mul_mat_id: matrices of which every token takes n_expert_used
    n_expert_used: int | None = None


@dataclass(frozen=True)
class Ceilings:
    """What a machine can do at best: a line of a kind of its own in results files."""

    measured_at: str
    machine: Machine
    on_gpu: bool
    rates: tuple[Rate, ...]
    schema: int = SCHEMA


def to_json(value: Any) -> str:
    """Dataclasses, however nested, as one line of JSON without spaces."""
    return json.dumps(value, default=_fields_of, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def from_json(cls: type[T], text: str) -> T:
    """The dataclass that `to_json` wrote. Unknown keys are ignored; ValueError says what is wrong."""
    return typing.cast(T, _build(cls, json.loads(text), cls.__name__))


def parse_line(line: bytes) -> Record | Ceilings:
    """A line of a results file: a run, or ceilings. ValueError says why it cannot be read."""
    if not line.endswith(b"\n"):
        raise ValueError("it is not whole (the end of the line is missing)")
    try:
        data = json.loads(line, parse_constant=_no_number)
        if b"\\ud" in line.lower():
            json.dumps(data, ensure_ascii=False).encode()  # half of a letter is no text
    except ValueError:
        raise ValueError("it is not JSON") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if not isinstance(schema, int) or schema < 1:
        raise ValueError("it is not a record of the lab (no schema number)")
    if schema > SCHEMA:
        raise ValueError(f"it has schema {schema}, this lab reads up to {SCHEMA}; update mini-lab to read it")
    if "rates" in data:
        return typing.cast(Ceilings, _build(Ceilings, data, "ceilings"))
    return typing.cast(Record, _build(Record, data, "record"))


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _fields_of(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value` (parsed JSON) as the type `kind`, checked."""
    if isinstance(kind, types.UnionType):
        (kind,) = [part for part in typing.get_args(kind) if part is not types.NoneType]
        return None if value is None else _build(kind, value, where)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not an object")
        hints = _hints(typing.cast(type, kind))
        return kind(**{name: _build(hint, value.get(name), f"{where}.{name}") for name, hint in hints.items()})  # type: ignore[operator]
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(value, list):
            raise ValueError(f"{where} is not a list")
        if dataclasses.is_dataclass(item):
            return tuple(_build(item, part, where) for part in value)
        if not set(map(type, value)) <= {item}:
            raise ValueError(f"{where} holds something that is not {item.__name__}")
        return tuple(value)
    plain = typing.get_origin(kind) or kind
    if plain is float and type(value) is int:
        return float(value)
    if type(value) is not plain:
        raise ValueError(f"{where} is missing" if value is None else f"{where} is not {plain.__name__}: {value!r}")
    return value
