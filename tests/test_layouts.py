"""Memory of weights in the layouts of the CPU's kernels: AMX and CPU_REPACK."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.core import layouts, memory
from lab.core.matrices import ATTENTION, BLOCKS, EMBEDDING, EXPERTS, UNMULTIPLIED, Matrix
from lab.core.memory import CPU, Tensor
from lab.core.record import Model, Settings
from lab.models import catalog, synthetic
from lab.process.worker import Worker
from lab.runner import machine, placement
from lab.runner.plan import make_plan
from tests.support import miniature
from tests.support.fake_worker import FakeWorker
from tests.support.records import SETTINGS

AVX2 = "CPU : SSE3 = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | OPENMP = 1 | REPACK = 1 |"
AVX512 = f"{AVX2} AVX512 = 1 | AVX512_VBMI = 1 | AVX512_VNNI = 1 |"
AMX = f"{AVX512} AMX_INT8 = 1 |"
RASPBERRY = "CPU : NEON = 1 | ARM_FMA = 1 | FP16_VA = 1 | DOTPROD = 1 | REPACK = 1 |"
APPLE = f"{RASPBERRY} MATMUL_INT8 = 1 |"
ON_CPU = dataclasses.replace(SETTINGS, n_gpu_layers=0, n_ctx=512)


@pytest.fixture(scope="module")
def engine() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


def weights_bytes(model: Model, system_info: str | None, settings: Settings = ON_CPU) -> int:
    return memory.of_context(model, settings, system_info).weights_bytes


def test_amx_keeps_the_embedded_model_in_130_mb(engine: Worker, embedded: Path) -> None:
    """As llama.cpp logged on a Xeon with AMX: 96.6 MB of weights became 130.2 MB."""
    model = engine.read_model(embedded, "m", "file")
    tensors = engine.tensors(embedded)

    def placed_mb(system_info: str) -> float:
        places = memory.places(model, ON_CPU, tensors, [], (), system_info)
        assert places is not None
        return round(places[0].memory.weights_bytes / 1e6, 1)

    assert placed_mb(AVX2) == 96.6
    assert placed_mb(AVX512) == 96.6
    assert placed_mb(AMX) == 130.2
    more_bytes = 49152 * 576 // 32 * 38  # the copy of the table: 38 bytes for 32 numbers
    assert weights_bytes(model, AMX) == weights_bytes(model, None) + more_bytes
    # Arm repacks Q8_0, in blocks of the same size
    assert (
        weights_bytes(model, RASPBERRY) == weights_bytes(model, None) + 49152 * 576 // 32 * 34
    )


def matrix(kind: str, rows: int = 256, columns: int = 512, part: str = ATTENTION) -> Matrix:
    return Matrix(part, kind, rows, columns, 1)


def features(system_info: str) -> layouts.CpuFeatures:
    return layouts.features(ON_CPU, system_info)


@pytest.mark.parametrize(
    ("kind", "added"),
    [
        ("F32", None),
        ("F16", 0),
        ("BF16", None),
        ("Q4_0", 0),
        ("Q4_1", 0),
        ("Q5_0", None),
        ("Q5_1", None),
        ("Q8_0", 4 * 16),
        ("Q2_K", None),
        ("Q3_K", None),
        ("Q4_K", 4 * 2),
        ("Q5_K", 4 * 2),
        ("Q6_K", 0),
        ("IQ4_XS", 2 * 2),
        ("IQ4_NL", None),
        ("IQ2_XS", None),
        ("MXFP4", None),
    ],
)
def test_amx_adds_bytes_to_the_blocks_of_some_types(kind: str, added: int | None) -> None:
    """By row: 512 columns are 16 blocks of 32 or 2 of 256; None: AMX does not take the type."""
    amx = frozenset({"AMX_INT8", "AVX512_VNNI"})
    table = matrix(kind, part=EMBEDDING)
    assert layouts.added_bytes([matrix(kind)], amx) == 256 * (added or 0)
    copy = 0 if added is None else round(table.n_bytes) + 256 * added
    assert layouts.copy_bytes(table, amx) == copy


@pytest.mark.parametrize(
    ("rows", "columns", "is_packed"),
    [(32, 32, True), (16, 32, False), (48, 32, False), (64, 96, True), (1, 32, False)],
)
def test_amx_takes_whole_tiles(rows: int, columns: int, is_packed: bool) -> None:
    added = layouts.added_bytes([matrix("Q8_0", rows, columns)], features(AMX))
    assert added == (4 * rows * columns // 32 if is_packed else 0)


def test_experts_and_tables_stay_as_in_the_file() -> None:
    for part in (EXPERTS, EMBEDDING, UNMULTIPLIED):
        assert layouts.added_bytes([matrix("Q8_0", part=part)], features(AMX)) == 0
    for name in ("token_embd.weight", "blk.0.ffn_up_exps.weight", "blk.0.attn_q.bias"):
        size = (512, 256, 8) if "exps" in name else (512, 256)
        packed = layouts.matrix_of(name, "Q8_0", size)
        assert packed is None or layouts.added_bytes([packed], features(AMX)) == 0
    assert layouts.matrix_of("output_norm.weight", "F32", (512, 1, 1, 1)) is None
    assert layouts.matrix_of("blk.0.attn_q.weight", "A_NEW_TYPE", (512, 256)) is None


@pytest.mark.parametrize(
    ("system_info", "kinds"),
    [
        ("", ""),
        ("CPU : AVX2 = 1 |", ""),  # built without REPACK
        ("CPU : AVX2 = 0 | REPACK = 1 |", ""),
        (AVX2, "Q4_0 Q4_K IQ4_NL MXFP4"),
        (AVX512, "Q4_0 Q4_K IQ4_NL MXFP4 Q2_K"),
        (AMX, "Q4_0 Q4_K IQ4_NL MXFP4 Q2_K F16 Q4_1 Q8_0 Q5_K Q6_K IQ4_XS"),
        (RASPBERRY, "Q1_0 Q4_0 Q4_K Q5_K Q6_K Q8_0 IQ4_NL MXFP4"),
        (APPLE, "Q1_0 Q4_0 Q4_K Q5_K Q6_K Q8_0 IQ4_NL MXFP4"),
        ("CPU : VXE = 1 | REPACK = 1 |", "Q4_0"),
    ],
)
def test_a_tied_table_has_a_copy_where_the_output_has_another_layout(
    system_info: str, kinds: str
) -> None:
    copied = set()
    for kind in BLOCKS:
        if layouts.copy_bytes(matrix(kind, part=EMBEDDING), features(system_info)):
            copied.add(kind)
    assert copied == set(kinds.split())


def test_the_layouts_are_for_the_cpu_alone() -> None:
    assert features(AMX) >= layouts.AMX
    assert not layouts.features(dataclasses.replace(ON_CPU, repack=False), AMX)
    assert layouts.features(dataclasses.replace(ON_CPU, repack=True), AMX)
    for devices in (["CUDA0"], ["Vulkan0", "RPC0"], ["SYCL0"], ["ROCm0", "ROCm1"]):
        assert not layouts.features(ON_CPU, AMX, devices)
    for devices in (["RPC0"], ["MTL0"], ["Metal"], []):
        assert layouts.features(ON_CPU, AMX, devices)
    assert not layouts.features(ON_CPU, None)


def test_layers_on_a_server_leave_the_others_in_the_layout_of_the_cpu() -> None:
    tensors = (
        Tensor("token_embd.weight", 136, "Q8_0", (32, 32)),
        Tensor("blk.0.attn_q.weight", 34 * 32, "Q8_0", (32, 32)),
        Tensor("blk.1.attn_q.weight", 34 * 32, "Q8_0", (32, 32)),
    )
    settings = dataclasses.replace(SETTINGS, n_gpu_layers=2, n_ctx=512)
    model = dataclasses.replace(catalog_model(), n_layer=2)
    places = memory.places(model, settings, tensors, ["RPC0"], (1,), AMX)
    assert places is not None
    by_device = {place.device: place.memory.weights_bytes for place in places}
    assert by_device == {"RPC0": 34 * 32 + 136, CPU: 38 * 32 + 136}


def catalog_model() -> Model:
    return synthetic.model_of(catalog.entries()["smollm2-135m"], "Q8_0")


def test_a_plan_is_refused_by_the_memory_of_the_layout(
    fake_worker: FakeWorker, embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the file's size and that of the layout: it fits without AMX only."""
    fake_worker.model = catalog_model()
    plan = make_plan(fake_worker, [10], 4, 1, str(embedded))
    [case] = plan.cases
    on = {}
    for system_info in (AVX2, AMX):
        here = dataclasses.replace(plan.machine, system_info=system_info)
        on[system_info] = dataclasses.replace(plan, machine=here)
    least_bytes = on[AVX2].memory(case).total_bytes
    most_bytes = on[AMX].memory(case).total_bytes
    assert most_bytes > 1.1 * least_bytes
    middle = (least_bytes + most_bytes) // 2
    monkeypatch.setattr(machine, "memory_available", lambda: middle)
    assert placement.checked(on[AVX2]).refused == {}
    [refusal] = placement.checked(on[AMX]).refused.values()
    assert "GB are available" in refusal
    assert memory.longest(plan.model, middle, system_info=AVX2)
    assert not memory.longest(plan.model, middle, system_info=AMX)


def test_llama_cpp_keeps_a_copy_of_a_table_that_this_cpu_repacks(
    engine: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q4_0 as the type of a tied table, as in files that are quantized with --pure."""
    monkeypatch.setattr(synthetic, "_type_of_head", lambda quantization, kind, columns: kind)
    entry = miniature.entry("llama", n_layer=2, n_vocab=8192)
    path = tmp_path / "pure.gguf"
    synthetic.write(dataclasses.replace(entry.shape, tied_embeddings=True), "Q4_0", path)
    settings = dataclasses.replace(ON_CPU, mmap=False, flash_attn_resolved=None)
    model = engine.read_model(path, "m", "file")
    system_info = engine.build.system_info
    places = memory.places(model, settings, engine.tensors(path), [], (), system_info)
    assert places is not None
    engine.load(path, settings)
    engine.new_context(settings)
    weights = [b.n_bytes for b in engine.placement().buffers if b.part == "model"]
    assert places[0].memory.weights_bytes == pytest.approx(sum(weights), rel=0.01)


@pytest.mark.parametrize(
    ("cpu", "kind", "rows"),
    [
        *[("AVX2 = 1", kind, 8) for kind in ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4")],
        ("AVX512 = 1", "Q2_K", 8),
        *[
            (f"NEON = 1 | {products} = 1", kind, rows)
            for products in ("MATMUL_INT8", "DOTPROD")
            for kind, rows in (
                ("Q4_0", 4),
                ("Q4_K", 8),
                ("Q5_K", 8),
                ("Q6_K", 8),
                ("Q8_0", 4),
                ("Q1_0", 4),
            )
        ],
        ("NEON = 1 | DOTPROD = 1", "IQ4_NL", 4),
        ("NEON = 1 | DOTPROD = 1", "MXFP4", 4),
        ("VXE = 1", "Q4_0", 4),
    ],
)
def test_rows_that_cpu_repack_takes(cpu: str, kind: str, rows: int) -> None:
    features = layouts.features(SETTINGS, f"{cpu} | REPACK = 1")
    table = Matrix(EMBEDDING, kind, rows, 256, 1)
    assert layouts.copy_bytes(table, features) == table.n_bytes
    half = dataclasses.replace(table, rows=rows // 2)
    assert layouts.copy_bytes(half, features) == 0
    assert layouts.copy_bytes(table, layouts.features(SETTINGS, cpu)) == 0


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("F16", 16),
        ("Q4_0", 32),
        ("Q4_1", 32),
        ("Q8_0", 32),
        *[(kind, 256) for kind in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")],
    ],
)
def test_columns_that_amx_takes(kind: str, columns: int) -> None:
    features = layouts.features(SETTINGS, "AMX_INT8 = 1 | AVX512_VNNI = 1")
    table = Matrix(EMBEDDING, kind, 32, columns, 1)
    assert layouts.copy_bytes(table, features) >= table.n_bytes
    assert layouts.copy_bytes(dataclasses.replace(table, columns=columns // 2), features) == 0
    assert layouts.copy_bytes(dataclasses.replace(table, rows=16), features) == 0
