"""The data: a run is a list of steps, and a step is one call of `llama_decode`.

A results file has one JSON line for each run, complete with machine, model, settings and steps. So
`cat a.jsonl b.jsonl` is a valid results file, and a crash loses at most the current run. Files
contain times; rates are computed from them. All `_ns` stamps come from one monotonic clock and
count from the run's first `start_ns`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from lab.core.asked_settings import UNPACKED_TYPES
from lab.core.bounds import (
    Amount,
    Batch,
    Choice,
    Context,
    Count,
    Duration,
    Extent,
    Layers,
    Nanoseconds,
    Number,
    Operations,
    Parts,
    Seed,
    Sequences,
    Size,
    Text,
    Whole,
    Width,
)
from lab.core.matrices import Matrix
from lab.core.sampling import Sampling

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 4  # of a line. It rises when old lines cannot be read: new fields have a default

# Kinds of steps
PREFILL = "prefill"
DECODE = "decode"
MIXED = "mixed"  # tokens of a prompt, and one token of each decoding sequence
DRAFT = "draft"  # in speculation: a token is drafted
VERIFY = "verify"  # in speculation: several drafted tokens are verified at once

# Kinds of steps without tokens, which change a sequence's cache
FORGET = "forget"
COPY = "copy"
SAVE = "save"
LOAD = "load"

# The status of a run
OK = "ok"
FAILED = "failed"  # the engine reported an error: out of memory, an invalid setting
CRASHED = "crashed"  # the engine's process ended: by a crash, or killed from outside

# What joules cover
PACKAGE = "package"  # the CPUs
DRAM = "dram"
GPU = "gpu"  # graphics cards

Value = Count | Number | Text | bool | None  # of a case
UNKNOWN_THREADS = -1  # llama.cpp's own number for "not chosen", in imported results


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model file and its shape. None: the file does not say it."""

    name: Text
    source: Text  # embedded, hub, file, synthetic (random weights), requantized
    repo: Text | None = None
    file: Text
    revision: Text | None = None
    sha256: Text | None = None
    n_bytes: Size | None = None
    quantization: Text | None = None
    arch: Text | None = None
    n_layer: Layers | None = None
    n_embd: Width | None = None
    n_head: Parts | None = None
    n_head_kv: Parts | None = None
    head_dim: Parts | None = None
    n_ff: Width | None = None
    n_vocab: Width | None = None
    n_ctx_train: Width | None = None
    tied_embeddings: bool | None = None
    tensor_bytes: dict[Text, Size]  # bytes by tensor type
    embedding_bytes: Size | None = None  # of the token embedding table
    output_bytes: Size | None = None  # of the output matrix, unless it is the embedding table
    output_type: Text | None = None
    n_expert: Parts | None = None
    n_params: Size | None = None
    description: Text | None = None  # by llama.cpp
    n_expert_used: Parts | None = None  # experts that process a token
    matrices: tuple[Matrix, ...] | None = None  # from the table of tensors
    # By layer: positions that a token attends to (0: all); None: no windows
    windows: tuple[Width, ...] | None = None
    heads: tuple[Parts, ...] | None = None  # by layer, if they differ
    heads_kv: tuple[Parts, ...] | None = None  # by layer, if they differ
    head_dim_v: Parts | None = None  # of values, if it differs from that of keys
    n_ff_expert: Width | None = None  # width of one expert
    # F32 values that its recurrent layers keep of a sequence, if it has such layers
    n_state: Size | None = None
    head_dims: tuple[Parts, ...] | None = None  # of keys and values by layer, if they differ
    n_layer_kv: Count | None = None  # the first layers have caches, which the others read
    is_chunked: bool | None = None  # windows do not slide: a token sees its chunk
    values_in_keys: bool | None = None  # the cache holds compressed keys with values (MLA)
    states: tuple[Size, ...] | None = None  # F32 values of a sequence's state, by layer
    state_flops: Size | None = None  # FLOPs of a token on the states of all layers
    # A feature of the architecture that the lab's arithmetic does not cover
    uncounted: Text | None = None


@dataclass(frozen=True)
class Device:
    """A device that the llama.cpp build can compute on. `type` is cpu, gpu, igpu or accel."""

    name: Text
    description: Text
    type: Text
    memory_bytes: Size | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a run. None: unknown, as most fields of imported results."""

    cpu: Text | None = None
    n_cores_physical: Parts | None = None
    n_cores_usable: Parts | None = None
    ram_bytes: Size | None = None
    os: Text | None = None
    python: Text | None = None
    llama_cpp_python: Text | None = None
    llama_cpp_commit: Text | None = None
    system_info: Text | None = None
    devices: tuple[Device, ...]
    virtual: bool | None = None
    power: Text | None = None  # mains, battery
    # CPU time that a container allows, in cores; n_cores_usable is rounded
    cpu_quota: Number | None = None
    # Logical cores that it may run on, where the quota allows less
    n_cores_affinity: Parts | None = None
    lib: Text | None = None  # libraries used instead of the installed ones, as in Settings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of llama.cpp. The lab's defaults are llama-bench's."""

    n_ctx: Context
    n_batch: Batch
    n_ubatch: Batch
    n_threads: Choice  # UNKNOWN_THREADS in imported results
    n_threads_batch: Choice
    n_gpu_layers: Choice
    flash_attn: Text | None  # requested: on, off, auto; None: unknown, in imported results
    flash_attn_resolved: Text | None = None  # used by llama.cpp: on, off
    type_k: Text | None  # None: unknown, in imported results
    type_v: Text | None
    prompt: Text  # text, random, or a file's name
    prompt_sha256: Text | None = None
    seed: Seed | None = None
    n_seq_max: Sequences = 1  # maximum number of sequences
    kv_unified: bool = False  # one cache for all sequences, instead of one each
    # Placement. None: llama.cpp's choice.
    # Devices for layers, by llama.cpp's names; empty: none
    devices: tuple[Text, ...] | None = None
    rpc: tuple[Text, ...] | None = None  # HOST:PORT of llama.cpp's RPC servers
    split_mode: Text | None = None  # none, layer, row, tensor
    main_gpu: Choice | None = None  # with split_mode none: index of the device
    tensor_split: tuple[Number, ...] | None = None  # shares of the devices
    n_cpu_moe: Choice | None = None  # layers whose experts stay on the CPU
    override_tensor: tuple[Text, ...] | None = None  # PATTERN=DEVICE
    kv_offload: bool | None = None
    op_offload: bool | None = None
    mmap: bool | None = None
    # Weights in the layouts of the CPU's fastest kernels: CPU_REPACK, AMX
    repack: bool | None = None
    # Libraries of another build: the end of the folder's path, a part of their checksum
    lib: Text | None = None
    # How to wait in prefill: step (for each step, as None) or end (once)
    prefill_wait: Text | None = None
    # How threads wait for each other: spins, sleep, default. None: as the environment says
    wait: Whole | Text | None = None
    # As the runtime took it; of libomp such as "200 ms", and active for spinning without end
    wait_resolved: Whole | Text | None = None
    openmp: Text | None = None  # libgomp, libomp, vcomp; none: ggml's own barrier, which spins
    openmp_variables: tuple[Text, ...] | None = None  # NAME=VALUE of the engine's environment
    # How tokens are chosen. None: greedy
    sampling: Sampling | None = None

    @property
    def can_be_plain(self) -> bool:
        """Whether attention can be plain: llama.cpp reads packed values only in flash
        attention."""
        return self.cache_types[1].lower() in UNPACKED_TYPES

    @property
    def flash_attention(self) -> str | None:
        """What llama.cpp used, on or off; auto if it never said, which counts as on. None:
        unknown."""
        return self.flash_attn_resolved or self.flash_attn

    @property
    def cache_types(self) -> tuple[str, str]:
        """The types of the K and V cache; llama.cpp's default where they are unknown."""
        return self.type_k or "f16", self.type_v or "f16"

    @property
    def stated_flash(self) -> bool | None:
        """Whether attention is flash attention; None in imported results that do not say it.

        With auto llama.cpp uses it where the device can.
        """
        if self.flash_attention is None:
            return None
        return self.flash_attention != "off"

    @property
    def uses_flash(self) -> bool:
        """Whether attention is flash attention; where it is unknown, it is counted as such."""
        return self.stated_flash is not False

    @property
    def thread_wait(self) -> int | str | None:
        """How threads waited, or shall wait; None: by default, or it is not known."""
        wait = self.wait if self.wait_resolved is None else self.wait_resolved
        return None if wait == "default" else wait


@dataclass(frozen=True)
class Buffer:
    part: Text  # model, KV, RS (of recurrent layers), compute, output
    name: Text  # llama.cpp's: CPU_Mapped, CPU_REPACK, AMX, CUDA0
    n_bytes: Size


@dataclass(frozen=True)
class Placement:
    """The devices and buffers of a model and its context, from llama.cpp's log."""

    layers: tuple[Text, ...]  # the device of each layer, by name; the last one is the output's
    buffers: tuple[Buffer, ...]
    caches: tuple[Text, ...] = ()  # the device of each layer's cache; "": none, or unknown
    experts: tuple[Text, ...] = ()  # the memory of each layer's experts, if some were moved


@dataclass(frozen=True)
class Steps:
    """Columns of equal length with one row for each operation of the run's script.

    An operation is a call of `llama_decode`, or it changes a sequence's cache (`forget`, `copy`,
    `save`, `load`) and has no tokens. A `draft` is a step of the draft model, or a lookup in the
    text without tokens.
    """

    kind: tuple[Text, ...] = ()
    n_tokens: tuple[Count, ...] = ()
    # Tokens in the context before the step; for several sequences the maximum
    n_past: tuple[Count, ...] = ()
    start_ns: tuple[Nanoseconds, ...] = ()  # just before `llama_decode`
    ready_ns: tuple[Nanoseconds, ...] = ()  # after `llama_synchronize`
    end_ns: tuple[Nanoseconds, ...] = ()  # after sampling
    n_seq: tuple[Count, ...] = ()
    n_outputs: tuple[Count, ...] = ()  # tokens that got logits

    def __post_init__(self) -> None:
        # Not by vars(): columns that a line lacks are not in it.
        lengths = {column.name: len(getattr(self, column.name)) for column in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of steps differ in length: {lengths}")

    def frame(self) -> pd.DataFrame:
        """A row per operation: the columns, and `start_s` and `end_s`."""
        import pandas as pd

        steps = pd.DataFrame(
            {column.name: getattr(self, column.name) for column in fields(self)}
        )
        return steps.assign(start_s=steps.start_ns / 1e9, end_s=steps.end_ns / 1e9)


@dataclass(frozen=True)
class Gpu:
    """The state of an NVIDIA GPU. `slowed` names what limits its clock (heat, power brake), if
    anything does."""

    name: Text
    slowed: Text | None = None
    # Most of its time that other processes used in a sample of the driver
    others_percent: Whole | None = None


@dataclass(frozen=True)
class NoiseReading:
    """The load of the machine, from the operating system. Counters start at boot."""

    # Time during which some task waited for memory (Linux PSI)
    memory_pressure_s: Number | None = None
    n_throttled: Count | None = None  # how often heat slowed cores
    gpus: tuple[Gpu, ...] | None = None
    quota_wait_s: Number | None = None  # time during which a container's CPU quota was used up


@dataclass(frozen=True)
class NoiseSamples:
    """The load of the machine during a run, ten times a second; each row since the previous one.
    None: not reported."""

    at_ms: tuple[Whole, ...]  # since the first reading
    # CPU time of all other processes, on all cores that the lab may run on
    others_ms: tuple[Whole, ...] | None = None
    steal_ms: tuple[Whole, ...] | None = None  # taken by the host of a virtual machine

    def __post_init__(self) -> None:
        columns = (self.at_ms, self.others_ms, self.steal_ms)
        lengths = {len(column) for column in columns if column is not None}
        if not self.at_ms or len(lengths) > 1:
            raise ValueError("the columns of noise samples are empty, or differ in length")


@dataclass(frozen=True)
class Threads:
    """The engine's threads in looks during a run, ten times a second, and their counters."""

    n_processors: Count  # that they may run on
    n_looks: Count
    n_together: Count  # looks at two or more threads that could run, not more than processors
    n_shared: Count  # of these: two of them were on one processor
    n_switches: Count | None = None  # involuntary
    run_ns: Nanoseconds | None = None
    wait_ns: Nanoseconds | None = None  # they could run, and waited for a processor


@dataclass(frozen=True)
class Noise:
    """Readings around a run. A sentinel is the same short decode before and after it: the median of
    its steps."""

    before: NoiseReading
    after: NoiseReading
    samples: NoiseSamples | None = None
    sentinel_before_ns: Nanoseconds | None = None
    sentinel_after_ns: Nanoseconds | None = None
    # Of the run, by what they cover, with everything that ran on it
    joules: dict[Text, Amount] | None = None
    threads: Threads | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One executed script, usually a prefilled prompt and n_gen generated tokens: the replicate of
    every experiment."""

    n_prompt: Count
    n_gen: Count
    repeat: Count
    warmup: bool
    started_at: Text
    status: Text
    error: Text | None = None
    steps: Steps
    token_ids: tuple[Width, ...]  # the chosen tokens, step by step
    # First end-of-generation token, which stops no run
    end_of_generation_at: Whole | None = None
    noise: Noise | None = None
    block: Count | None = None  # runs of one block were measured side by side
    variant: Text | None = None  # the compared settings, in the user's words
    engine: Count | None = None  # number of the engine's start in its session; None if unknown
    placement: Placement | None = None  # None if unknown
    part: Text | None = None  # of a larger session, whose results have tables of their own
    experiment: Text | None = None  # None: a plain run, or a sweep
    # What identifies the case; {"every": n}
    case: dict[Text, Value] = field(default_factory=dict)
    # That operations returned
    counts: dict[Text, tuple[Whole, ...]] = field(default_factory=dict)
    imported_from: Text | None = None  # the tool that measured it

    def __post_init__(self) -> None:
        if self.every is None:
            return
        begins_with_prefill = self.steps.kind[:1] in ((), (PREFILL,))
        if self.every < 1 or not begins_with_prefill:
            raise ValueError(
                f"a sweep needs every >= 1 (it is {self.every}), and must begin with a prefill"
            )

    @property
    def every(self) -> int | None:
        """Of a sweep: after each `every` prompt tokens, n_gen tokens were generated and
        forgotten."""
        every = self.case.get("every")
        return every if isinstance(every, int) else None

    @property
    def is_plain(self) -> bool:
        """Whether the run is of no experiment: a prompt and an answer, or a sweep of them."""
        return self.experiment is None

    @property
    def is_apart(self) -> bool:
        """Whether the results of the run's command have tables of their own."""
        return self.part is not None

    @property
    def is_timed(self) -> bool:
        """Whether the run succeeded and is not a warm-up, so that its times count."""
        return self.status == OK and not self.warmup


@dataclass(frozen=True, repr=False)
class Record:
    """One line of a results file."""

    session: Text
    machine: Machine
    model: Model
    settings: Settings
    run: Run
    schema: Whole = SCHEMA
    draft_model: Model | None = None  # a second, smaller model that drafts tokens
    # The words that asked for the session, without secrets
    command: tuple[Text, ...] | None = None

    def __repr__(self) -> str:
        run = self.run
        model = f"{self.model.name} {self.model.quantization or ''}".strip()
        return f"<Record: {model}, {run.n_prompt} + {run.n_gen} tokens, {run.status}>"

    @property
    def status(self) -> str:
        return self.run.status

    @property
    def error(self) -> str | None:
        return self.run.error

    @property
    def started_at(self) -> str:
        return self.run.started_at

    @property
    def experiment(self) -> str | None:
        return self.run.experiment

    @property
    def case(self) -> dict[str, Value]:
        return self.run.case

    @property
    def is_warmup(self) -> bool:
        return self.run.warmup

    @property
    def is_good(self) -> bool:
        """Whether the line holds a result, as every kind of line says: here, a timed run."""
        return self.run.is_timed

    @property
    def model_name(self) -> str:
        return self.model.name


@dataclass(frozen=True)
class Rate:
    """A timed kernel: the bytes and FLOPs of a pass, and the time of each pass."""

    op: Text  # mul_mat, mul_mat_id, attention, plain_attention, read, upload, download
    type: Text  # of the weights, or of the cache
    buffer: Text  # the kind of memory: CPU, CPU_REPACK, AMX, CUDA0
    rows: Extent
    columns: Extent
    n_tokens: Count
    n_threads: Choice
    n_bytes: Size
    flops: Operations
    times_ns: tuple[Duration, ...]
    n_head_kv: Parts | None = None  # of attention
    n_positions: Count | None = None  # of attention: length of the context
    n_expert: Parts | None = None  # of mul_mat_id: matrices; every token uses n_expert_used
    n_expert_used: Parts | None = None


@dataclass(frozen=True)
class Ceilings:
    """The highest rates of a device's kernels: a separate kind of line in results files."""

    measured_at: Text
    machine: Machine
    on_gpu: bool  # not the CPU
    rates: tuple[Rate, ...]
    schema: Whole = SCHEMA
    device: Text | None = None  # by llama.cpp's name; None: the CPU
    # Of further devices that the same settings use; in files each is a line
    others: tuple[Ceilings, ...] | None = None
    repack: bool | None = None  # of the CPU: as in Settings
    disturbed: Text | None = None  # what disturbed the session
    kind: Text = "ceilings"  # of a line
