"""Does lab bisect find a build that is slower, and none where none is?

    python -m tests.bench.bisect simulated           # made-up machines, a minute
    python -m tests.bench.bisect planted             # 20 series, about 2 hours on two quiet cores
    python -m tests.bench.bisect planted --quick 4   # the first 4; --begin 4: the next ones
    python -m tests.bench.bisect none --quick 5      # 5 of 20 series of equal builds
    python -m tests.bench.bisect compiled            # two real builds of one source, half an hour
    python -m tests.bench.bisect real                # versions 0.3.20 to 0.3.36, builds included

`simulated`: the search alone, with the 20 series of `planted` five times and 100 of equal builds,
at four sizes of noise of a run. `planted`: series of 8 copies of the installed build; from one on,
its library waits in every step until the step has taken 1.03, 1.05, 1.1 or 1.5 times as long, in
prefill, decode or both. At least 19 of 20 must end at the right pair, for exactly the figures that
are slow. `none`: 8 equal copies; no pair may be named in 20 series. `compiled`: from one build on,
the same source was compiled with -O1 instead of -O3; the pair must be found. `real` prints what it
found.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from lab.features.bisect import figures, measuring, package_index, series
from lab.features.bisect.figures import Bisected
from lab.features.bisect.lines import DECODE, FIGURES, PREFILL
from lab.features.bisect.sentences import sentences
from lab.process.worker import Worker
from lab.runner import builds
from lab.runner.progress import Status
from tests import test_bisect

N_SERIES = 20
N_BUILDS = 8
SIZES = (1.03, 1.05, 1.1, 1.5)
SLOW = ((PREFILL,), (DECODE,), FIGURES)
WORSE = "-DCMAKE_C_FLAGS_RELEASE=-O1 -DCMAKE_CXX_FLAGS_RELEASE=-O1"
COMPILED_AT = (2, 5)
N_SIMULATED = 100
NOISES = (0.005, 0.01, 0.015, 0.02)
DISTURBED = 0.02  # share of runs that take 1.3 times as long

SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <time.h>

struct batch { int32_t n_tokens; void *token, *embd, *pos, *n_seq_id, *seq_id, *logits; };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

int32_t llama_decode(void *context, struct batch batch) {
    static int32_t (*decode)(void *, struct batch);
    if (!decode) decode = dlsym(RTLD_NEXT, "llama_decode");
    double began = now();
    int32_t status = decode(context, batch);
    double took = now() - began;
    double factor = batch.n_tokens > 1 ? PREFILL : DECODE;
    while (now() - began < factor * took);
    return status;
}
"""
"""A library that comes before libllama and waits in llama_decode."""


def planted_case(number: int) -> tuple[int, dict[str, float]]:
    """The place of the first slow build, and by which factor it is slow in each figure."""
    place = random.Random(number).randrange(1, N_BUILDS)
    size = SIZES[number % len(SIZES)]
    slow = SLOW[number % len(SLOW)]
    return place, {figure: size if figure in slow else 1.0 for figure in FIGURES}


def installed() -> Path:
    """The folder of the installed libraries."""
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def waiting_copy(folder: Path, factors: Mapping[str, float]) -> None:
    """A copy of the installed build that waits in every step."""
    shutil.copytree(installed(), folder)
    libllama = folder / "libllama.so"
    libllama.unlink()  # its other name, libllama.so.0, stays
    source = folder / "shim.c"
    source.write_text(SHIM)
    options = [f"-DPREFILL={factors[PREFILL]}", f"-DDECODE={factors[DECODE]}"]
    command = ["cc", "-O1", "-shared", "-fPIC", *options, str(source), "-o", str(libllama)]
    command += [f"-L{folder}", "-Wl,--no-as-needed", "-l:libllama.so.0"]
    command += ["-Wl,-rpath,$ORIGIN", "-ldl"]
    subprocess.run(command, check=True)


@contextmanager
def copies(fast: Mapping[str, float], slow: Mapping[str, float], at: int) -> Iterator[Path]:
    """A folder of waiting builds: `fast` ones, from place `at` on `slow` ones."""
    with tempfile.TemporaryDirectory() as folder:
        for place in range(N_BUILDS):
            factors = slow if place >= at else fast
            waiting_copy(Path(folder) / f"b{9100 + 10 * place}", factors)
        yield Path(folder)


def search(folder: Path, options: argparse.Namespace, seed: int) -> Bisected:
    """Search the builds in a folder."""
    labels = sorted(path.name for path in folder.iterdir())
    ends = [str(folder / labels[0]), str(folder / labels[-1])]
    with Worker() as worker:
        plan = measuring.plan(
            worker,
            ends[0],
            ends[1],
            prompt_len=options.prompt_len,
            gen=options.gen,
            budget=options.budget,
            seed=seed,
            threads=options.threads,
        )
    path = folder.parent / f"{folder.name}.jsonl"
    try:
        return figures.bisected(list(measuring.execute(plan, path, silent)))
    finally:
        path.unlink(missing_ok=True)


def silent(status: Status) -> None: ...


def pairs_of(result: Bisected) -> dict[str, tuple[int, int]]:
    """The proven pairs by figure."""
    proven = {}
    for figure in result.search.proven:
        halving = result.search.halvings[figure]
        proven[figure] = (halving.fast, halving.slow)
    return proven


def report(number: int, result: Bisected, is_right: bool, began: float, what: str) -> None:
    minutes = (time.monotonic() - began) / 60
    mark = "right" if is_right else "WRONG"
    n_blocks = len(result.search.blocks)
    disturbed = f"{result.n_disturbed} of {result.n_runs} runs disturbed"
    print(f"{number:2} {mark}: {what}; {n_blocks} blocks, {minutes:.1f} min, {disturbed}")
    if not is_right:
        print(f"   {' '.join(sentences(result))}")


def planted(options: argparse.Namespace) -> int:
    n_right = 0
    for number in range(options.begin, options.begin + options.quick):
        began = time.monotonic()
        place, factors = planted_case(number)
        fast = dict.fromkeys(FIGURES, 1.0)
        slow = [figure for figure in FIGURES if factors[figure] > 1]
        with copies(fast, factors, place) as folder:
            result = search(folder, options, number)
        is_right = pairs_of(result) == dict.fromkeys(slow, (place - 1, place))
        n_right += is_right
        what = f"{' and '.join(slow)} {max(factors.values())} from build {place}"
        report(number, result, is_right, began, what)
    print(f"{n_right} of {options.quick} found")
    return n_right


def none(options: argparse.Namespace) -> int:
    n_false = 0
    equal = dict.fromkeys(FIGURES, 1.0)
    for number in range(options.begin, options.begin + options.quick):
        began = time.monotonic()
        with copies(equal, equal, N_BUILDS) as folder:
            result = search(folder, options, number)
        is_right = not pairs_of(result)
        n_false += not is_right
        report(number, result, is_right, began, f"equal builds, ends {result.search.ends}")
    print(f"a pair named in {n_false} of {options.quick}")
    return n_false


def simulated(options: argparse.Namespace) -> None:
    """The search alone, on machines whose runs differ by so much."""
    for noise in NOISES:
        n_right = 0
        n_false = 0
        for number in range(N_SIMULATED):
            truth, pairs = test_bisect.planted(number % N_SERIES)
            search = test_bisect.searched(truth, number, noise, disturbed=DISTURBED)
            n_right += test_bisect.proven_pairs(search) == pairs
            equal = dict.fromkeys(FIGURES, test_bisect.FLAT)
            flat = test_bisect.searched(equal, number, noise, disturbed=DISTURBED)
            n_false += bool(test_bisect.proven_pairs(flat))
        print(
            f"noise {100 * noise:g} %: {n_right} of {N_SIMULATED} found, a pair named in {n_false} "
            f"of {N_SIMULATED} series of equal builds"
        )


def compiled(options: argparse.Namespace) -> None:
    """Series of one source, compiled as the lab does and with worse options."""
    with Worker() as worker:
        version = worker.build.llama_cpp_python
    good = package_index.build(version, show_build)
    before = os.environ.get("CMAKE_ARGS", "")
    os.environ["CMAKE_ARGS"] = f"{before} {WORSE}".strip()
    package_index.checksum.cache_clear()
    bad = package_index.build(version, show_build)
    os.environ["CMAKE_ARGS"] = before
    package_index.checksum.cache_clear()
    for number, place in enumerate(COMPILED_AT[: options.quick]):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as parent:
            for build in range(N_BUILDS):
                libraries = builds.with_libllama(bad if build >= place else good)
                assert libraries
                shutil.copytree(libraries, Path(parent) / f"b{9100 + 10 * build}")
            result = search(Path(parent), options, number)
        pairs = set(pairs_of(result).values())
        is_right = pairs == {(place - 1, place)}
        report(number, result, is_right, began, f"-O1 from build {place}")


def show_build(n_done: int, n_all: int) -> None:
    if n_done % 20 == 0:
        print(f"file {n_done} of {n_all}", file=sys.stderr)


def real(options: argparse.Namespace) -> None:
    began = time.monotonic()
    candidates = series.find(options.good, options.bad)
    print(measuring.cost_of_builds(candidates))
    result = measuring.bisect(
        options.good,
        options.bad,
        prompt_len=options.prompt_len,
        gen=options.gen,
        budget=options.budget,
    )
    print("\n".join(sentences(result)))
    print(f"{(time.monotonic() - began) / 60:.0f} min with the builds")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    commands = {
        "simulated": simulated,
        "planted": planted,
        "none": none,
        "compiled": compiled,
        "real": real,
    }
    parser.add_argument("what", choices=tuple(commands))
    parser.add_argument("--quick", type=int, default=N_SERIES, help="number of series")
    parser.add_argument("--begin", type=int, default=0, help="number of the first one")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen", type=int, default=32)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--budget", default="1h", help="of each search")
    parser.add_argument("--good", default="0.3.20")
    parser.add_argument("--bad", default="0.3.36")
    options = parser.parse_args(arguments)
    commands[options.what](options)


if __name__ == "__main__":
    main()
