"""Which kernels are probed, where their rates hold, and which of several sessions count."""

import collections
import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest

from lab.app import output
from lab.core.matrices import EMBEDDING, EXPERTS, FEED_FORWARD, OUTPUT, Matrix
from lab.core.record import Ceilings, Device, Machine, Model, Placement, Rate, Settings
from lab.errors import LabError
from lab.features import ceilings as ceilings_module
from lab.process.wire import (
    ATTENTION,
    DOWNLOAD,
    MUL_MAT,
    MUL_MAT_ID,
    PLAIN_ATTENTION,
    UPLOAD,
    Probe,
)
from lab.roofline import measuring, probes, probing
from lab.roofline.probing import Where
from lab.roofline.step_kernels import StepKernels
from lab.show import console, section
from tests.support.ceilings import (
    GPU,
    ON_CPU,
    ON_GPU,
    TINY,
    WITH_GPU,
    attention,
    ceilings,
    product,
)
from tests.support.records import MACHINE, SETTINGS, make_record, make_run

SPLIT_THREADS = dataclasses.replace(
    SETTINGS,
    n_threads=1,
    n_threads_batch=2,
    n_ubatch=64,
)
CACHE_BYTES = 10**8


@pytest.fixture(autouse=True)
def cache_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "last_level_cache", lambda: CACHE_BYTES)


def with_matrices(*matrices: Matrix, **changes: Any) -> Model:
    return dataclasses.replace(TINY, matrices=matrices, **changes)


def sizes(timed: list[Probe], **values: Any) -> list[tuple[int, int, int]]:
    """Tokens, threads and bytes of the probes with these values."""
    chosen = []
    for probe in timed:
        if all(getattr(probe, name) == value for name, value in values.items()):
            chosen.append((probe.n_tokens, probe.n_threads, probe.n_bytes))
    return chosen


def forms(timed: list[Probe]) -> list[tuple[str, str, int, int]]:
    """Operation, type and shape of the probes of products, each once."""
    products = [probe for probe in timed if probe.op in (MUL_MAT, MUL_MAT_ID)]
    return list(
        dict.fromkeys((probe.op, probe.type, probe.rows, probe.columns) for probe in products)
    )


# Which kernels are probed


def test_products_are_probed_by_columns_and_go_through_memory_where_it_matters() -> None:
    timed = probes.probes(TINY, SPLIT_THREADS)
    thread_bytes = 2e9 / 2 * 34 / 32  # that a thread multiplies with one token
    assert sizes(timed, rows=128) == [
        (1, 1, 4 * CACHE_BYTES),
        (2, 2, 4 * CACHE_BYTES),
        (4, 2, 4 * CACHE_BYTES),
        (8, 2, round(2 * thread_bytes / 8)),
        (32, 2, round(2 * thread_bytes / 32)),
        (64, 2, CACHE_BYTES // 4),
        (128, 2, round(2 * thread_bytes / 128)),
    ]
    first = timed[0]
    assert first.op == MUL_MAT
    assert first.type == "Q8_0"
    assert first.columns == 64
    assert first.seconds == 0.2
    assert first.n_head_kv is None
    assert first.n_expert is None
    assert first.repack is None
    assert first.device is None
    on_gpu = probes.probes(TINY, dataclasses.replace(SPLIT_THREADS, repack=False), (), "CUDA0")
    of_gpu_cache = probes.DEFAULT_CACHE
    assert sizes(on_gpu, rows=128) == [
        (1, 1, 4 * of_gpu_cache),
        (2, 1, 4 * of_gpu_cache),
        (4, 1, 4 * of_gpu_cache),
        (8, 1, 4 * of_gpu_cache),
        (32, 1, of_gpu_cache),
        (64, 1, of_gpu_cache // 4),
        (128, 1, of_gpu_cache // 4),
    ]
    assert {probe.repack for probe in on_gpu} == {None}
    plain = probes.probes(TINY, dataclasses.replace(SPLIT_THREADS, repack=False))
    assert plain[0].repack is False


def test_a_pass_stays_within_limits() -> None:
    mega = 2**20
    assert probes.pass_bytes(4) == 4 * CACHE_BYTES
    assert probes.pass_bytes(0.25) == 25 * 10**6
    assert probes.pass_bytes(99) == max(probes.MOST_PASS, 99 * 16 * mega)
    assert probes.pass_bytes(1, "CUDA0") == 64 * mega
    assert probes.pass_bytes(0.1, "CUDA0") == round(6.4 * mega)


def test_a_small_cache_does_not_make_passes_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "last_level_cache", lambda: 1000)
    assert [probes.pass_bytes(times) for times in (4, 1)] == [64 * 2**20, 16 * 2**20]


def test_the_shape_with_most_bytes_is_probed_and_a_second_one_with_a_fifth_of_them() -> None:
    table = Matrix(EMBEDDING, "F16", 1000, 64, 1)

    def forms_with(n_second: float) -> list[tuple[str, str, int, int]]:
        model = with_matrices(
            table,
            Matrix(OUTPUT, "Q6_K", 20_000, 256, 1),
            Matrix(FEED_FORWARD, "Q8_0", 64, 64, n_second),
            Matrix(FEED_FORWARD, "Q8_0", 128, 64, 200),
            Matrix(FEED_FORWARD, "Q8_0", 32, 64, 1),
        )
        return forms(probes.probes(model, SPLIT_THREADS))

    output = (MUL_MAT, "Q6_K", 16_384, 256)
    assert forms_with(101) == [
        output,
        (MUL_MAT, "Q8_0", 128, 64),
        (MUL_MAT, "Q8_0", 64, 64),
    ]
    assert forms_with(90) == [output, (MUL_MAT, "Q8_0", 128, 64)]


def test_at_most_two_shapes_of_a_type_are_probed_and_at_least_one() -> None:
    def rows_of(sizes_in_rows: list[int]) -> list[int]:
        matrices = [Matrix(FEED_FORWARD, "Q8_0", rows, 64, 100) for rows in sizes_in_rows]
        model = with_matrices(Matrix(EMBEDDING, "F16", 100, 64, 1), *matrices)
        return [
            form[2] for form in forms(probes.probes(model, SPLIT_THREADS)) if form[1] == "Q8_0"
        ]

    assert rows_of([100, 99, 98]) == [100, 99]
    assert rows_of([96, 97, 98, 99, 100, 101]) == [101]


def test_an_output_matrix_is_probed_with_few_tokens_and_a_second_shape_with_few_sizes() -> (
    None
):
    model = with_matrices(
        Matrix(EMBEDDING, "Q8_0", 1000, 64, 1),
        Matrix(FEED_FORWARD, "Q8_0", 128, 64, 5),
    )
    timed = probes.probes(model, SPLIT_THREADS)
    assert [n for n, _, _ in sizes(timed, rows=1000)] == [1, 2, 4, 8]
    assert [n for n, _, _ in sizes(timed, rows=128)] == [1, 64]


def test_experts_have_a_kernel_of_their_own() -> None:
    model = with_matrices(
        Matrix(EMBEDDING, "F16", 1000, 64, 1),
        Matrix(FEED_FORWARD, "Q8_0", 64, 64, 1),
        Matrix(FEED_FORWARD, "Q8_0", 32, 64, 1),
        Matrix(EXPERTS, "Q8_0", 128, 64, 40, 8),
        Matrix(EXPERTS, "Q8_0", 256, 64, 15, 8),
        n_expert_used=2,
    )
    timed = probes.probes(model, SPLIT_THREADS, ["Q4_0"])
    ids = MUL_MAT_ID
    assert forms(timed) == [
        (ids, "Q8_0", 128, 64),
        (ids, "Q8_0", 256, 64),
        (MUL_MAT, "Q8_0", 64, 64),
        (MUL_MAT, "F16", 1000, 64),
        (ids, "Q4_0", 128, 64),
        (MUL_MAT, "Q4_0", 64, 64),
    ]
    experts = {(probe.n_expert, probe.n_expert_used) for probe in timed if probe.op == ids}
    assert experts == {(8, 2)}
    assert {probe.n_expert for probe in timed if probe.op == MUL_MAT} == {None}


def test_further_types_are_probed_in_the_largest_shape_that_fits_them() -> None:
    model = with_matrices(
        Matrix(EMBEDDING, "Q8_0", 1000, 256, 1),
        Matrix(FEED_FORWARD, "Q8_0", 512, 96, 50),
        Matrix(FEED_FORWARD, "Q8_0", 128, 256, 20),
        Matrix(FEED_FORWARD, "Q8_0", 128, 512, 1),
    )
    named = forms(probes.probes(model, SPLIT_THREADS, ["Q8_0", "Q4_0", "Q4_K"]))
    assert named[-2:] == [(MUL_MAT, "Q4_0", 512, 96), (MUL_MAT, "Q4_K", 128, 256)]
    assert len(set(named)) == len(named)
    for kind, message in (
        ("F32", "not a weight type"),
        ("X", "not a weight type"),
        ("Q6_K", "wide"),
    ):
        with pytest.raises(LabError, match=message):
            probes.probes(TINY, SPLIT_THREADS, [kind])
    with pytest.raises(LabError, match=r"kernels of tiny cannot be derived from its header\."):
        probes.probes(dataclasses.replace(TINY, n_head=None), SPLIT_THREADS)
    with pytest.raises(LabError, match=r"kernels of tiny .* \(recurrent\)"):
        probes.probes(dataclasses.replace(TINY, uncounted="recurrent"), SPLIT_THREADS)


def test_types_with_a_hundredth_of_the_bytes_are_used() -> None:
    def used(n: float) -> list[str]:
        matrices = (
            Matrix(EMBEDDING, "Q8_0", 1000, 64, 1),
            Matrix(FEED_FORWARD, "F32", 17, 100, 100),
            Matrix(FEED_FORWARD, "F16", 17, 100, n),
        )
        return probes.used_types(with_matrices(*matrices))

    assert used(3) == ["F32", "Q8_0", "F16"]
    assert used(2) == ["F32", "Q8_0"]


OFF = {"flash_attn": "off", "flash_attn_resolved": None}
"""A plan without flash attention, which no engine has resolved yet."""


def test_attention_is_probed_at_lengths_that_fit_into_memory() -> None:
    def at(changes: dict[str, Any], **of_model: Any) -> list[tuple[str, int, int, int, int]]:
        model = dataclasses.replace(TINY, **of_model)
        timed = probes.probes(model, dataclasses.replace(SPLIT_THREADS, **changes))
        return [
            (probe.op, probe.n_tokens, probe.n_positions or 0, probe.n_threads, probe.n_bytes)
            for probe in timed
            if probe.op in (ATTENTION, PLAIN_ATTENTION)
        ]

    bytes_of_token = min(probes.MOST_CACHES, 4 * CACHE_BYTES)
    flash = [
        (ATTENTION, 1, 256, 1, bytes_of_token),
        (ATTENTION, 1, 512, 1, bytes_of_token),
        (ATTENTION, 64, 512, 2, 1),
        (ATTENTION, 1, 4096, 1, bytes_of_token),
        (ATTENTION, 64, 4096, 2, 1),
        (ATTENTION, 1, 32768, 1, bytes_of_token),
    ]

    def both(n_probes: int) -> list[tuple[str, int, int, int, int]]:
        plain = [(PLAIN_ATTENTION, a, b, c, d) for _, a, b, c, d in flash[:n_probes]]
        return [*flash[:n_probes], *plain]

    assert at({}) == at(OFF) == both(6)
    # 32,768 positions x 2 x 2 heads x 4,096 elements x 2 bytes are exactly 1 GiB
    assert at({}, head_dim=4096) == both(6)
    assert at({}, head_dim=4097) == both(5)
    assert at({}, head_dim=2**20) == both(3)
    assert at({"type_k": "q8_0", "type_v": "q8_0"}) == flash
    assert at({"type_v": "f32"}) == flash
    # 8 bytes x 4 heads x n x 4,096 positions are 2 GiB with 16,384 tokens
    many = at({**OFF, "n_ubatch": 16_384})
    assert (PLAIN_ATTENTION, 16_384, 4096, 2, 1) in many
    more = at({**OFF, "n_ubatch": 16_385})
    assert (PLAIN_ATTENTION, 16_385, 4096, 2, 1) not in more
    assert (PLAIN_ATTENTION, 16_385, 512, 2, 1) in more
    (first, *_) = [
        probe for probe in probes.probes(TINY, SPLIT_THREADS) if probe.op == ATTENTION
    ]
    assert first.rows == 4
    assert first.columns == 16
    assert first.n_head_kv == 2
    assert first.type == "F16"


def test_the_heads_of_most_layers_are_probed() -> None:
    model = dataclasses.replace(
        TINY,
        heads=(4, 8, 8, 8),
        heads_kv=(2, 2, 2, 2),
    )
    timed = probes.probes(model, SPLIT_THREADS)
    assert {probe.rows for probe in timed if probe.op == ATTENTION} == {8}


def test_copies_are_probed_for_a_gpu() -> None:
    timed = probes.probes(TINY, SPLIT_THREADS, (), "CUDA0")
    copied = [
        (probe.op, probe.columns, probe.n_bytes)
        for probe in timed
        if probe.op in (UPLOAD, DOWNLOAD)
    ]
    assert copied == [
        (op, n_bytes // 4, n_bytes) for op in (UPLOAD, DOWNLOAD) for n_bytes in probes.COPIES
    ]
    assert UPLOAD not in {probe.op for probe in probes.probes(TINY, SPLIT_THREADS)}


def test_the_caches_of_the_last_level_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    files = {
        "cpu0/cache/index0": ("1", "32K", "0"),
        "cpu0/cache/index1": ("3", "16M", "0-1"),
        "cpu1/cache/index1": ("3", "16M", "0-1"),
        "cpu2/cache/index1": ("3", "8M", "2"),
        "cpu3/cache/index1": ("3", "?", "3"),
        "cpu4/cache/index1": ("3", "512K", "4"),
        "cpu5/cache/index1": ("3", "1G", "5"),
    }
    texts = {}
    for name, values in files.items():
        for file, text in zip(("level", "size", "shared_cpu_list"), values, strict=True):
            texts[f"/sys/devices/system/cpu/{name}/{file}"] = f"{text}\n"
    monkeypatch.setattr(
        Path, "glob", lambda folder, pattern: [folder / name for name in files]
    )
    monkeypatch.setattr(probes, "system_text", lambda path: texts[str(path)])
    assert probes.last_level_cache.__wrapped__() == 24 * 2**20 + 512 * 2**10 + 2**30
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [])
    assert probes.last_level_cache.__wrapped__() == 64 * 2**20


def test_probes_without_a_rate_are_missing_and_two_rounds_of_them_take_a_second_each() -> None:
    timed = probes.probes(TINY, SPLIT_THREADS)
    rates = [product(probe.n_tokens, 1, n_threads=probe.n_threads) for probe in timed[:3]]
    assert probes.missing(timed, rates) == timed[3:]
    assert measuring.expected_s(timed[:7]) == 7.0


# Where ceilings hold


TWO_GPUS = dataclasses.replace(
    WITH_GPU, devices=(*WITH_GPU.devices, dataclasses.replace(GPU, name="CUDA1"))
)


@pytest.mark.parametrize(
    ("changes", "placement", "devices"),
    [
        ({}, None, (None,)),
        (
            {"n_gpu_layers": 99},
            None,
            ("CUDA0",),
        ),
        (
            {"n_gpu_layers": 2},
            None,
            (None, "CUDA0"),
        ),
        (
            {"n_gpu_layers": 4},
            None,
            ("CUDA0", None),
        ),
        (
            {"n_gpu_layers": 99, "kv_offload": False},
            None,
            ("CUDA0", None),
        ),
        (
            {"n_gpu_layers": 99, "n_cpu_moe": 1},
            None,
            ("CUDA0", None),
        ),
        (
            {"n_gpu_layers": 99, "override_tensor": ("exps=CPU",)},
            None,
            ("CUDA0", None),
        ),
        (
            {},
            ("CPU", "CUDA0", "CUDA0", "CUDA0", "CUDA0"),
            ("CUDA0", None),
        ),
        ({}, ("CUDA0",), (None,)),  # not a placement of this model
    ],
)
def test_a_place_has_the_devices_of_its_layers_the_one_with_most_first(
    changes: dict[str, Any], placement: tuple[str, ...] | None, devices: tuple[str | None, ...]
) -> None:
    settings = dataclasses.replace(SETTINGS, **changes)
    placed = None if placement is None else Placement(placement, ())
    place = probing.place_of(WITH_GPU, TINY, settings, placed)
    assert place == Where(WITH_GPU, devices, None, TINY, settings)
    record = make_record(
        make_run(placement=placed), machine=WITH_GPU, model=TINY, settings=settings
    )
    assert probing.place_of_record(record) == place
    assert len(probing.layers_of(record)) == 5


def test_devices_share_layers_as_they_were_told() -> None:
    devices = (Device("CUDA0", "", "gpu", 10**9), Device("CUDA1", "", "gpu", 10**9))
    here = dataclasses.replace(MACHINE, devices=devices)

    def layers(split: tuple[float, ...] | None) -> collections.Counter[str | None]:
        settings = dataclasses.replace(SETTINGS, n_gpu_layers=99, tensor_split=split)
        return collections.Counter(probing.layers(here, TINY, settings))

    assert layers(None) == {"CUDA0": 3, "CUDA1": 2}
    assert layers((4, 1)) == {"CUDA0": 4, "CUDA1": 1}


def test_ceilings_hold_on_the_same_machine_build_devices_and_layout() -> None:
    assert probing.hold_for(ON_CPU, Where(MACHINE))
    assert not probing.hold_for(ON_CPU, Where(MACHINE, repack=False))
    assert probing.hold_for(ON_CPU, Where(MACHINE, repack=True))
    plain = dataclasses.replace(ON_CPU, repack=False)
    assert probing.hold_for(plain, Where(MACHINE, repack=False))
    assert not probing.hold_for(plain, Where(MACHINE))
    of_gpu = dataclasses.replace(ON_GPU, others=None)
    assert not probing.hold_for(of_gpu, Where(WITH_GPU))
    assert probing.hold_for(of_gpu, Where(WITH_GPU, ("CUDA0",), repack=False))
    swapped = dataclasses.replace(ON_GPU, machine=TWO_GPUS, others=None)
    assert probing.hold_for(swapped, Where(TWO_GPUS, ("CUDA1",)))  # the same kind of device
    changed: dict[str, Any] = {
        "cpu": "other",
        "n_cores_usable": 1,
        "ram_bytes": 1,
        "llama_cpp_python": "1",
        "llama_cpp_commit": "1",
        "system_info": "AVX",
        "lib": "other",
    }
    for name, value in changed.items():
        other_machine = dataclasses.replace(MACHINE, **{name: value})
        assert not probing.hold_for(ON_CPU, Where(other_machine)), name
        assert probing.differences(MACHINE, other_machine) == [probing.SAME_IN[name]]
    assert probing.differences(MACHINE, WITH_GPU) == ["devices"]
    assert probing.same_machine(MACHINE, dataclasses.replace(MACHINE, os="other"))


def test_without_repacking_there_are_other_ceilings() -> None:
    plain = dataclasses.replace(ceilings(product(1, 0.1)), repack=False)
    settings = dataclasses.replace(SETTINGS, repack=False)
    for place, expected in (
        (probing.place_of(MACHINE, TINY, SETTINGS), ON_CPU),
        (probing.place_of(MACHINE, TINY, settings), plain),
    ):
        best = probing.known([ON_CPU, plain], place)
        assert best is not None
        assert best.rates == expected.rates
        assert best.repack == expected.repack
    with pytest.raises(LabError) as problem:
        StepKernels(TINY, SETTINGS, plain).total(1, 0, 1)
    assert problem.value.hint.endswith("--no-repack")


# Which of several sessions count


def session(day: int, *rates: Any, disturbed: str | None = None, **changes: Any) -> Ceilings:
    made_at = f"2026-01-{day:02}T00:00:00Z"
    return dataclasses.replace(
        ceilings(*rates), measured_at=made_at, disturbed=disturbed, **changes
    )


def needs(n_threads: int, here: Machine = MACHINE) -> Where:
    """Where TINY runs with so many threads."""
    settings = dataclasses.replace(SETTINGS, n_threads=n_threads, n_threads_batch=n_threads)
    return probing.place_of(here, TINY, settings)


NOISE = "other processes used 1.5 cores"


def test_the_best_pass_of_all_sessions_counts_and_the_newest_names_the_day() -> None:
    slow = session(1, product(1, 4), product(8, 2))
    fast = session(3, product(1, 3))
    slower = session(2, product(1, 5), attention(1, 9))
    best = probing.known([fast, slow, slower], Where(MACHINE))
    assert best is not None
    assert best.measured_at[:10] == "2026-01-03"
    assert best.disturbed is None
    assert best.others is None
    assert set(best.rates) == {*fast.rates, slow.rates[1], slower.rates[1]}


def test_a_disturbed_session_does_not_spoil_a_quiet_one_that_has_what_is_needed() -> None:
    quiet = session(
        1,
        product(1, 4, n_threads=1),
        attention(1, 4, n_threads=1),
    )
    newer = session(
        2, product(1, 9, n_threads=2), product(1, 9, "Q4_0", n_threads=1), disturbed=NOISE
    )
    best = probing.known([quiet, newer], needs(1))
    assert best is not None
    assert best.disturbed is None
    assert best.rates == quiet.rates
    assert best.measured_at == quiet.measured_at
    needed = probing.known([quiet, newer], needs(2))
    assert needed is not None
    assert needed.disturbed == NOISE
    assert newer.rates[0] in needed.rates
    undecided = probing.known([quiet, newer], Where(MACHINE))
    assert undecided is not None
    assert undecided.disturbed == NOISE
    only = probing.known([newer], needs(1))
    assert only is not None
    assert only.disturbed == NOISE
    assert only.rates == newer.rates
    again = session(3, *newer.rates)
    trusted = probing.known([newer, quiet, again], needs(2))
    assert trusted is not None
    assert trusted.disturbed is None


def test_a_plain_read_counts_with_the_threads_that_are_needed() -> None:
    read = product(1, 1, "I64", op=probes.READ, n_threads=2)
    quiet = session(1, product(1, 4, n_threads=1))
    disturbed = session(2, read, disturbed=NOISE)
    for n_threads, is_needed in ((1, False), (2, True)):
        best = probing.known([quiet, disturbed], needs(n_threads))
        assert best is not None
        assert (read in best.rates) == is_needed
        assert (best.disturbed == NOISE) == is_needed


def test_what_is_missing_is_not_known() -> None:
    assert probing.known([], Where(MACHINE)) is None
    assert probing.known([ON_CPU], Where(WITH_GPU, (None, "CUDA0"))) is None
    here = dataclasses.replace(ON_CPU, machine=WITH_GPU)
    of_gpu = dataclasses.replace(ON_GPU, others=None)
    both = probing.known([here, of_gpu], Where(WITH_GPU, ("CUDA0", None)))
    assert both is not None
    assert both.device == "CUDA0"
    assert [of_device.device for of_device in probing.each_device(both)] == ["CUDA0", None]
    assert probing.lines(both) == [
        dataclasses.replace(of_device, others=None) for of_device in probing.each_device(both)
    ]
    assert probing.lines(None) == []
    swapped = dataclasses.replace(of_gpu, machine=TWO_GPUS)
    assert probing.known([swapped], Where(TWO_GPUS, ("CUDA0", "CUDA1"))) is None
    moved = probing.known([swapped], Where(TWO_GPUS, ("CUDA1",)))
    assert moved is not None
    assert moved.device == "CUDA1"
    assert moved.machine == TWO_GPUS


def test_the_error_says_what_there_is_instead_and_in_what_it_differs() -> None:
    def problem(
        sessions: list[Ceilings],
        where: Where,
        label: str,
    ) -> str:
        with pytest.raises(LabError) as error:
            probing.need(sessions, where, label)
        return f"{error.value.what} {error.value.hint}"

    there = "Measure them on that machine, with the settings of the runs: lab ceilings"
    assert problem([], Where(MACHINE), "these runs") == (
        f"The ceilings of these runs have not been measured. {there}"
    )
    elsewhere = dataclasses.replace(MACHINE, ram_bytes=1, llama_cpp_commit="abc")
    sessions = [dataclasses.replace(ON_CPU, machine=elsewhere)]
    assert problem(sessions, Where(MACHINE), probing.HERE) == (
        "The known ceilings are of another machine or build (Test CPU, 4 cores, llama.cpp abc), "
        "not of this machine; what differs: memory, commit of llama.cpp. "
        "Measure them: lab ceilings"
    )
    on_gpu = Where(WITH_GPU, ("CUDA0", None))
    here = dataclasses.replace(ON_CPU, machine=WITH_GPU)
    assert problem([here], on_gpu, "these runs") == (
        f"The ceilings of CUDA0 (Test GPU), for these runs have not been measured. {there}"
    )
    assert problem([], Where(MACHINE, repack=False), "these runs").endswith(
        f"without repacking have not been measured. {there} --no-repack"
    )
    two = Where(TWO_GPUS, ("CUDA0", "CUDA1"))
    assert "for one GPU" in problem([], two, "these runs")
    assert probing.need([ON_CPU], Where(MACHINE), "these runs").rates == ON_CPU.rates


def test_what_is_unknown_is_measured_whatever_disturbed_it() -> None:
    settings: Settings = SPLIT_THREADS
    where = probing.place_of(MACHINE, TINY, settings)
    timed = probes.probes(TINY, settings, ["Q4_0"])
    assert measuring.unknown(TINY, settings, ["Q4_0"], where, []) == timed
    rates = []
    for probe in timed[1:]:
        names = [field.name for field in dataclasses.fields(Rate)]
        values = {name: getattr(probe, name) for name in names if hasattr(probe, name)}
        rates.append(dataclasses.replace(product(1, 1), **values))
    sessions = [
        session(1, product(9, 1)),
        session(2, *rates, disturbed=NOISE),
    ]
    assert measuring.unknown(TINY, settings, ["Q4_0"], where, sessions) == timed[:1]


# What is printed


def test_the_next_command_measures_the_kernels_of_the_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lab.runner.machine.default_threads", lambda: 2)
    model = dataclasses.replace(TINY, name="smollm2-135m", source="embedded")
    plain = dataclasses.replace(SETTINGS, n_ubatch=512, prompt="random")
    narrow = dataclasses.replace(plain, n_threads=1, n_threads_batch=1)
    quantized = dataclasses.replace(
        plain,
        type_k="q8_0",
        type_v="q8_0",
        repack=False,
    )
    records = [
        make_record(
            make_run(),
            model=model,
            settings=settings,
        )
        for settings in (plain, plain, narrow, quantized)
    ]
    lines = probing.commands(records)
    assert lines == [
        "lab ceilings",
        "lab ceilings --threads 1",
        "lab ceilings --cache-type-k q8_0 --cache-type-v q8_0 --no-repack",
    ]
    steps = output.next_steps(records, Path("results"), output.ceilings_command(records))
    assert steps == [f"next     what limited each phase: {' && '.join(lines)}"]
    for line in lines:
        ceilings_module.command.make_context("ceilings", shlex.split(line)[2:])


def test_a_narrow_terminal_keeps_the_threads_of_ceilings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rates = (
        product(
            1,
            1,
            rows=576,
            columns=1536,
            n_threads=2,
            buffer="CPU_REPACK",
        ),
        attention(
            1,
            1,
            n_positions=32768,
            rows=32,
            columns=128,
        ),
    )
    out = console.console()
    with out.capture() as shown:
        section.print_sections([ceilings_module.section(ceilings(*rates))], out)
    header = next(line for line in shown.get().splitlines() if line.startswith("kernel"))
    assert "threads" in header
    assert "GB/s" in header
    assert "GFLOP/s" in header
    assert all(len(line) <= 80 for line in shown.get().splitlines()[3:])
