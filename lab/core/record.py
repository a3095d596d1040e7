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
from lab.core.sampling import Sampling
from lab.core.shape import Matrix

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
CRASHED = "crashed"  # the engine's process died

# What joules cover
PACKAGE = "package"  # the CPUs
DRAM = "dram"
GPU = "gpu"  # graphics cards

Value = int | float | str | bool | None  # of a case
UNKNOWN_THREADS = -1  # llama.cpp's own number for "not chosen", in imported results


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model file and its shape. None: the file does not say it."""

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
    output_bytes: int | None = None  # of the output matrix, unless it is the embedding table
    output_type: str | None = None
    n_expert: int | None = None
    n_params: int | None = None
    description: str | None = None  # by llama.cpp
    n_expert_used: int | None = None  # experts that process a token
    matrices: tuple[Matrix, ...] | None = None  # from the table of tensors
    # By layer: positions that a token attends to (0: all); None: no windows
    windows: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None  # by layer, if they differ
    heads_kv: tuple[int, ...] | None = None  # by layer, if they differ
    head_dim_v: int | None = None  # of values, if it differs from that of keys
    n_ff_expert: int | None = None  # width of one expert
    # F32 values that its recurrent layers keep of a sequence, if it has such layers
    n_state: int | None = None
    head_dims: tuple[int, ...] | None = None  # of keys and values by layer, if they differ
    n_layer_kv: int | None = None  # the first layers have caches, which the others read
    is_chunked: bool | None = None  # windows do not slide: a token sees its chunk
    values_in_keys: bool | None = None  # the cache holds compressed keys with values (MLA)
    states: tuple[int, ...] | None = None  # F32 values of a sequence's state, by layer
    state_flops: int | None = None  # FLOPs of a token on the states of all layers
    # A feature of the architecture that the lab's arithmetic does not cover
    uncounted: str | None = None


@dataclass(frozen=True)
class Device:
    """A device that the llama.cpp build can compute on. `type` is cpu, gpu, igpu or accel."""

    name: str
    description: str
    type: str
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a run. None: unknown, as most fields of imported results."""

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
    # CPU time that a container allows, in cores; n_cores_usable is rounded
    cpu_quota: float | None = None
    # Logical cores that it may run on, where the quota allows less
    n_cores_affinity: int | None = None
    lib: str | None = None  # libraries used instead of the installed ones, as in Settings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of llama.cpp. The lab's defaults are llama-bench's."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int  # UNKNOWN_THREADS in imported results
    n_threads_batch: int
    n_gpu_layers: int
    flash_attn: str | None  # requested: on, off, auto; None: unknown, in imported results
    flash_attn_resolved: str | None = None  # used by llama.cpp: on, off
    type_k: str | None  # None: unknown, in imported results
    type_v: str | None
    prompt: str  # text, random, or a file's name
    prompt_sha256: str | None = None
    seed: int | None = None
    n_seq_max: int = 1  # maximum number of sequences
    kv_unified: bool = False  # one cache for all sequences, instead of one each
    # Placement. None: llama.cpp's choice.
    # Devices for layers, by llama.cpp's names; empty: none
    devices: tuple[str, ...] | None = None
    rpc: tuple[str, ...] | None = None  # HOST:PORT of llama.cpp's RPC servers
    split_mode: str | None = None  # none, layer, row, tensor
    main_gpu: int | None = None  # with split_mode none: index of the device
    tensor_split: tuple[float, ...] | None = None  # shares of the devices
    n_cpu_moe: int | None = None  # layers whose experts stay on the CPU
    override_tensor: tuple[str, ...] | None = None  # PATTERN=DEVICE
    kv_offload: bool | None = None
    op_offload: bool | None = None
    mmap: bool | None = None
    # Weights in the layouts of the CPU's fastest kernels: CPU_REPACK, AMX
    repack: bool | None = None
    # Libraries of another build: the end of the folder's path, a part of their checksum
    lib: str | None = None
    # How to wait in prefill: step (for each step, as None) or end (once)
    prefill_wait: str | None = None
    # How threads wait for each other: spins, sleep, default. None: as the environment says
    wait: int | str | None = None
    # As the runtime took it; of libomp such as "200 ms", and active for spinning without end
    wait_resolved: int | str | None = None
    openmp: str | None = None  # libgomp, libomp, vcomp; none: ggml's own barrier, which spins
    openmp_variables: tuple[str, ...] | None = None  # NAME=VALUE of the engine's environment
    # How tokens are chosen. None: greedy
    sampling: Sampling | None = None

    @property
    def can_be_plain(self) -> bool:
        """Whether attention can be plain: llama.cpp reads packed values only in flash
        attention."""
        return self.cache_types[1].lower() in UNPACKED_TYPES

    @property
    def flash_attention(self) -> str | None:
        """What llama.cpp used, on or off; before it has decided, what was requested. None:
        unknown."""
        return self.flash_attn_resolved or self.flash_attn

    @property
    def cache_types(self) -> tuple[str, str]:
        """The types of the K and V cache; llama.cpp's default where they are unknown."""
        return self.type_k or "f16", self.type_v or "f16"

    @property
    def uses_flash(self) -> bool:
        """Whether attention is flash attention. With auto llama.cpp uses it where the device
        can."""
        return self.flash_attention != "off"

    @property
    def thread_wait(self) -> int | str | None:
        """How threads waited, or shall wait; None: by default, or it is not known."""
        wait = self.wait if self.wait_resolved is None else self.wait_resolved
        return None if wait == "default" else wait


@dataclass(frozen=True)
class Buffer:
    part: str  # model, KV, RS (of recurrent layers), compute, output
    name: str  # llama.cpp's: CPU_Mapped, CPU_REPACK, AMX, CUDA0
    n_bytes: int


@dataclass(frozen=True)
class Placement:
    """The devices and buffers of a model and its context, from llama.cpp's log."""

    layers: tuple[str, ...]  # the device of each layer, by name; the last one is the output's
    buffers: tuple[Buffer, ...]
    caches: tuple[str, ...] = ()  # the device of each layer's cache; "": none, or unknown
    experts: tuple[str, ...] = ()  # the memory of each layer's experts, if some were moved


@dataclass(frozen=True)
class Steps:
    """Columns of equal length with one row for each operation of the run's script.

    An operation is a call of `llama_decode`, or it changes a sequence's cache (`forget`, `copy`,
    `save`, `load`) and has no tokens. A `draft` is a step of the draft model, or a lookup in the
    text without tokens.
    """

    kind: tuple[str, ...] = ()
    n_tokens: tuple[int, ...] = ()
    # Tokens in the context before the step; for several sequences the maximum
    n_past: tuple[int, ...] = ()
    start_ns: tuple[int, ...] = ()  # just before `llama_decode`
    ready_ns: tuple[int, ...] = ()  # after `llama_synchronize`
    end_ns: tuple[int, ...] = ()  # after sampling
    n_seq: tuple[int, ...] = ()
    n_outputs: tuple[int, ...] = ()  # tokens that got logits

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

    name: str
    slowed: str | None = None
    # Most of its time that other processes used in a sample of the driver
    others_percent: int | None = None


@dataclass(frozen=True)
class NoiseReading:
    """The load of the machine, from the operating system. Counters start at boot."""

    # Time during which some task waited for memory (Linux PSI)
    memory_pressure_s: float | None = None
    n_throttled: int | None = None  # how often heat slowed cores
    gpus: tuple[Gpu, ...] | None = None
    quota_wait_s: float | None = None  # time during which a container's CPU quota was used up


@dataclass(frozen=True)
class NoiseSamples:
    """The load of the machine during a run, ten times a second; each row since the previous one.
    None: not reported."""

    at_ms: tuple[int, ...]  # since the first reading
    # CPU time of all other processes, on all cores that the lab may run on
    others_ms: tuple[int, ...] | None = None
    steal_ms: tuple[int, ...] | None = None  # taken by the host of a virtual machine

    def __post_init__(self) -> None:
        columns = (self.at_ms, self.others_ms, self.steal_ms)
        lengths = {len(column) for column in columns if column is not None}
        if not self.at_ms or len(lengths) > 1:
            raise ValueError("the columns of noise samples are empty, or differ in length")


@dataclass(frozen=True)
class Threads:
    """The engine's threads in looks during a run, ten times a second, and their counters."""

    n_processors: int  # that they may run on
    n_looks: int
    n_together: int  # looks at two or more threads that could run, not more than processors
    n_shared: int  # of these: two of them were on one processor
    n_switches: int | None = None  # involuntary
    run_ns: int | None = None
    wait_ns: int | None = None  # they could run, and waited for a processor


@dataclass(frozen=True)
class Noise:
    """Readings around a run. A sentinel is the same short decode before and after it: the median of
    its steps."""

    before: NoiseReading
    after: NoiseReading
    samples: NoiseSamples | None = None
    sentinel_before_ns: int | None = None
    sentinel_after_ns: int | None = None
    # Of the run, by what they cover, with everything that ran on it
    joules: dict[str, float] | None = None
    threads: Threads | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One executed script, usually a prefilled prompt and n_gen generated tokens: the replicate of
    every experiment."""

    n_prompt: int
    n_gen: int
    repeat: int
    warmup: bool
    started_at: str
    status: str
    error: str | None = None
    steps: Steps
    token_ids: tuple[int, ...]  # the chosen tokens, step by step
    # First end-of-generation token, which stops no run
    end_of_generation_at: int | None = None
    noise: Noise | None = None
    block: int | None = None  # runs of one block were measured side by side
    variant: str | None = None  # the compared settings, in the user's words
    engine: int | None = None  # number of the engine's start in its session; None if unknown
    placement: Placement | None = None  # None if unknown
    part: str | None = None  # of a larger session, whose results have tables of their own
    experiment: str | None = None  # None: a plain run, or a sweep
    # What identifies the case; {"every": n}
    case: dict[str, Value] = field(default_factory=dict)
    # That operations returned
    counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    imported_from: str | None = None  # the tool that measured it

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

    session: str
    machine: Machine
    model: Model
    settings: Settings
    run: Run
    schema: int = SCHEMA
    draft_model: Model | None = None  # a second, smaller model that drafts tokens
    # The words that asked for the session, without secrets
    command: tuple[str, ...] | None = None

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
    def is_timed(self) -> bool:
        """Whether its times count."""
        return self.run.is_timed

    @property
    def is_good(self) -> bool:
        """Whether it succeeded and is no warm-up."""
        return self.run.is_timed

    @property
    def model_name(self) -> str:
        return self.model.name


@dataclass(frozen=True)
class Rate:
    """A timed kernel: the bytes and FLOPs of a pass, and the time of each pass."""

    op: str  # mul_mat, mul_mat_id, attention, plain_attention, read, upload, download
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
    n_positions: int | None = None  # of attention: length of the context
    n_expert: int | None = None  # of mul_mat_id: matrices; every token uses n_expert_used
    n_expert_used: int | None = None


@dataclass(frozen=True)
class Ceilings:
    """The highest rates of a device's kernels: a separate kind of line in results files."""

    measured_at: str
    machine: Machine
    on_gpu: bool  # not the CPU
    rates: tuple[Rate, ...]
    schema: int = SCHEMA
    device: str | None = None  # by llama.cpp's name; None: the CPU
    # Of further devices that the same settings use; in files each is a line
    others: tuple[Ceilings, ...] | None = None
    repack: bool | None = None  # of the CPU: as in Settings
    disturbed: str | None = None  # what disturbed the session
    kind: str = "ceilings"  # of a line
