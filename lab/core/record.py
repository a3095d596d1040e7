"""The data: a run is a list of steps, and a step is one call of `llama_decode`.

Every experiment of the lab is a table of steps, and a results file is a list of runs: one JSON line per
run, each line complete in itself (machine, model, settings, steps). So `cat a.jsonl b.jsonl` is a valid
results file, a crash loses at most the run in flight, and rates are never stored, only derived.

All `_ns` stamps come from one monotonic clock and count from the run's first `start_ns`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lab.core.levers import Batch, Lever, Prefix, Speculation, Stall, name_of
from lab.core.link import Link
from lab.core.matrix import Matrix
from lab.core.noise import Noise

SCHEMA = 2
"""Version of a line. History: 1 (lab 0.1.0) is the first. 2: several sequences (`n_seq` and `n_outputs` of steps, steps
of further kinds, `n_seq_max` and `kv_unified` of settings, the experiments of runs: `batch` to `speculation`)."""

PREFILL = "prefill"
DECODE = "decode"
MIXED = "mixed"  # some tokens of a prompt, and one token each of sequences that decode
DRAFT, VERIFY = "draft", "verify"  # of speculation: tokens guessed, and several of them verified at once
FORGET, COPY, SAVE, LOAD = "forget", "copy", "save", "load"  # of what the cache holds of a sequence
OK = "ok"
FAILED = "failed"  # the engine said no: out of memory, a refused setting
CRASHED = "crashed"  # the engine's process died

UNKNOWN_THREADS = -1
"""llama.cpp's own number for "not chosen". Tables of results on GPUs do not show the number of threads."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model file and its shape. What the file does not say is None."""

    name: str
    source: str  # embedded, hub, file, synthetic (random weights), requantized
    repo: str | None = None
    file: str
    revision: str | None = None
    sha256: str | None = None
    n_bytes: int | None = None
    quantization: str | None = None
    arch: str | None = None
    n_layer: int | None = None
    n_embd: int | None = None
    n_head: int | None = None
    n_head_kv: int | None = None
    head_dim: int | None = None
    n_ff: int | None = None
    n_vocab: int | None = None
    n_ctx_train: int | None = None
    tied_embeddings: bool | None = None
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
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a run happened. What is not known (of imported results: most) is None, never a guess."""

    cpu: str | None = None
    n_cores_physical: int | None = None
    n_cores_usable: int | None = None
    ram_bytes: int | None = None
    os: str | None = None
    python: str | None = None
    llama_cpp_python: str | None = None
    llama_cpp_commit: str | None = None
    system_info: str | None = None
    devices: tuple[Device, ...]
    virtual: bool | None = None
    power: str | None = None  # mains, battery
    cpu_quota: float | None = None  # cores' worth of CPU time that a container allows; n_cores_usable has it rounded
    lib: str | None = None  # libraries in place of the installed ones, as in Settings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that was chosen about how llama.cpp runs. llama-bench's defaults are the lab's."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int  # UNKNOWN_THREADS in imported results
    n_threads_batch: int
    n_gpu_layers: int
    flash_attn: str  # asked: on, off, auto
    flash_attn_resolved: str | None = None  # what llama.cpp then did: on, off
    type_k: str
    type_v: str
    prompt: str  # text, random, or a file's name
    prompt_sha256: str | None = None
    seed: int | None = None
    n_seq_max: int = 1  # sequences that the context has room for
    kv_unified: bool = False  # one cache for all of them, instead of one each
    # Where it runs. None: llama.cpp's own choice.
    devices: tuple[str, ...] | None = None  # that layers may go to, by llama.cpp's names; empty: none
    split_mode: str | None = None  # none, layer, tensor
    tensor_split: tuple[float, ...] | None = None  # shares of the devices
    main_gpu: int | None = None  # with split_mode none: which of the devices
    n_cpu_moe: int | None = None  # layers whose experts stay on the CPU
    override_tensor: tuple[str, ...] | None = None  # PATTERN=BUFFER
    kv_offload: bool | None = None
    op_offload: bool | None = None
    mmap: bool | None = None
    repack: bool | None = None  # weights in the layouts of the CPU's own kernels (use_extra_bufts): CPU_REPACK, AMX
    rpc: tuple[str, ...] | None = None  # RPC servers, HOST:PORT
    lib: str | None = None  # libraries of another build: the end of their folder's path, and a part of their sum
    prefill_wait: str | None = None  # step: for each prefill step; end: once. None: step


@dataclass(frozen=True)
class Buffer:
    """Memory that llama.cpp took. `part` is model, KV, RS (of recurrent layers), compute or output.

    `name` is llama.cpp's of the buffer: CPU_Mapped, CPU_REPACK, AMX, CUDA0, or RPC0[HOST:PORT] (device 0 of that
    server). `device` is the name of the device that it belongs to; None in older records, and where ggml does not say.
    """

    part: str
    name: str
    n_bytes: int
    device: str | None = None


@dataclass(frozen=True)
class Placement:
    """Where a model and its context lie, from llama.cpp's log."""

    layers: tuple[str, ...]  # the device of each layer, by name; the last one is that of the output
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True)
class Steps:
    """One row per operation of the run's script, as columns of equal length: a call of `llama_decode`, or a `forget`,
    `copy`, `save` or `load` of what the cache holds of a sequence, which has no tokens. A `draft` is a step of the
    draft model, or a search in the text, which has none either.

    `n_past` is the position: tokens in the context before the step, of several sequences those of the one that has
    most. `start_ns` is taken just before `llama_decode`, `ready_ns` after `llama_synchronize`, `end_ns` after the next
    tokens are chosen. `n_outputs` is how many tokens got logits.
    """

    kind: tuple[str, ...] = ()
    n_tokens: tuple[int, ...] = ()
    n_past: tuple[int, ...] = ()
    start_ns: tuple[int, ...] = ()
    ready_ns: tuple[int, ...] = ()
    end_ns: tuple[int, ...] = ()
    n_seq: tuple[int, ...] | None = None  # None in records of schema 1, where there is one sequence
    n_outputs: tuple[int, ...] | None = None  # None in records of schema 1

    def __post_init__(self) -> None:
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lengths = {name: len(column) for name, column in columns.items() if column is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of steps differ in length: {lengths}")


@dataclass(frozen=True)
class Totals:
    """Times of whole phases, as another tool reports them; the lab itself records steps."""

    prefill_ns: int | None = None
    decode_ns: int | None = None  # of n_gen - 1 decode steps, without choosing tokens


@dataclass(frozen=True, kw_only=True)
class Run:
    """One script executed, mostly a prompt prefilled and n_gen tokens generated: the replicate of every experiment."""

    n_prompt: int
    n_gen: int
    repeat: int
    warmup: bool
    started_at: str
    status: str
    error: str | None = None
    steps: Steps
    token_ids: tuple[int, ...]  # the tokens that were chosen, step by step
    prompt_offset: int | None = None  # where in the tokenised text the prompt began
    end_of_generation_at: int | None = None  # index of the first end-of-generation token; it stops nothing
    noise: Noise | None = None
    every: int | None = None  # a sweep: n_gen tokens were generated and forgotten after each so many of the prompt
    block: int | None = None  # of `lab ab`: runs of one block were measured side by side
    variant: str | None = None  # of `lab ab`: which of the compared settings, in the user's words
    totals: Totals | None = None  # imported: there are no steps
    engine: int | None = None  # which start of the engine in its session made the run; None in older records
    batch: Batch | None = None
    prefix: Prefix | None = None
    stall: Stall | None = None
    speculation: Speculation | None = None
    draft: Model | None = None  # of speculation: the model that guessed
    accepted: tuple[int, ...] | None = None  # of speculation: how many of the guesses of each `verify` were right
    margins: tuple[float, ...] | None = None  # of speculation: logit of each chosen token - the next best one's
    part: str | None = None  # of `lab claims`: which of its measurements this run belongs to
    is_quick: bool | None = None  # of `lab claims`: whether it was run with --quick
    state_bytes: tuple[int, ...] | None = None  # of each `save`
    logits_differ: tuple[float, ...] | None = None  # largest differences of kept logits from the first ones kept
    placement: Placement | None = None  # None in older records
    link: Link | None = None  # the network that a relay made before the RPC servers, on top of the one that is there

    def __post_init__(self) -> None:
        if self.every is not None and (self.every < 1 or self.steps.kind[:1] not in ((), (PREFILL,))):
            raise ValueError(f"a sweep that stops every {self.every} tokens, or does not begin with a prefill")

    @property
    def lever(self) -> Lever | None:
        """What was tried beside plain measuring; None for nothing."""
        return self.batch or self.prefix or self.stall or self.speculation

    @property
    def name(self) -> str:
        """What it did, in words."""
        return name_of(self.n_prompt, self.lever)

    @property
    def is_timed(self) -> bool:
        """Whether it went well and is no warm-up: its times count."""
        return self.status == OK and not self.warmup


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
    """One kernel at one size, timed: what a pass read and computed, and how long each pass took."""

    op: str  # mul_mat, mul_mat_id, attention, plain_attention, read; upload, download: copies to and from a device
    type: str  # of the weights, or of the cache
    buffer: str  # the kind of memory: CPU, CPU_REPACK, AMX, CUDA0
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
    """What a device of a machine can do at best: a line of a kind of its own in results files.

    `others` are those of further devices that the same settings use. Files have a line for each instead. `missing` are
    the probes that were wanted when the session ended early, without times; `disturbed` says what took the machine.
    """

    measured_at: str
    machine: Machine
    on_gpu: bool  # not the CPU
    rates: tuple[Rate, ...]
    schema: int = SCHEMA
    device: str | None = None  # by llama.cpp's name; None: the CPU, or (in older files) the first GPU
    others: tuple[Ceilings, ...] | None = None
    repack: bool | None = None  # of the CPU: as in Settings
    missing: tuple[Rate, ...] | None = None
    disturbed: str | None = None
