"""The builds between a good and a bad one, in order: versions of the index, or folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.core.files import expanded, is_dir, is_file, listed
from lab.core.lists import join_and, plural
from lab.errors import LabError
from lab.features.bisect import names, package_index
from lab.process.setup import ProcessSetup
from lab.runner import builds

MOST_BUILDS = 1000
MOST_FOLDERS = 5000  # of --among, that are looked at
MOST_NAMED = 5
OF_OLLAMA = (".", "lib", "ollama", "lib/ollama")  # where Ollama keeps ggml
GET_RELEASE = (
    "Unpack a release of llama.cpp (llama-b9518-bin-...) into a folder and name the folder, or "
    "name versions of llama-cpp-python: --good 0.3.20 --bad 0.3.36"
)


@dataclass(frozen=True)
class SeriesBuild:
    """A build, not yet made or loaded: a version of llama-cpp-python, or a folder with libllama."""

    label: str
    version: str | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Series:
    """Builds from the good one to the bad one, and what was passed over."""

    builds: tuple[SeriesBuild, ...]
    notes: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(build.label for build in self.builds)


def find(good: str, bad: str, among: Sequence[str] = ()) -> Series:
    """The series from `good` to `bad`. LabError if one is no build, or if their order is unknown.

    `among`: a folder of builds, or builds in the order in which they were made.
    """
    first = named(good, "--good")
    last = named(bad, "--bad")
    if first == last:
        raise LabError(
            f"--good and --bad are the same build: {first.label}.", "Name two builds."
        )
    if first.version and last.version:
        return of_versions(first.version, last.version, among)
    if first.folder and last.folder:
        return of_folders(first, last, among)
    raise LabError(
        f"{first.label} and {last.label} are of two kinds: a version and a folder.",
        "Name two versions of llama-cpp-python, or two folders.",
    )


def named(text: str, option: str) -> SeriesBuild:
    """The build that an option names. LabError if it is none."""
    path = expanded(text)
    if is_dir(path):
        folder = builds.with_libllama(path.resolve())
        if folder:
            return SeriesBuild(path.resolve().name, folder=folder)
    version = names.version_of(text)
    if version and not is_dir(path):
        return SeriesBuild(version, version=version)
    raise LabError(f"{option} {text}: {reason_of(text, path)}", GET_RELEASE)


def reason_of(text: str, path: Path) -> str:
    """Why a text names no build."""
    if is_dir(path):
        has_ggml = any(listed(path / below, "libggml-base*") for below in OF_OLLAMA)
        if "ollama" in text.lower() or has_ggml:
            return "this folder has no libllama, as those of Ollama have none."
        return "neither this folder nor its bin, lib or build/bin contains libllama."
    if is_file(path):
        if path.name.endswith(names.ARCHIVE):
            return "this is an archive: unpack it first."
        return "this is a file. A build is a folder."
    if names.build_number(text):
        return "there is no such folder. The package index has no build numbers of llama.cpp."
    if names.COMMIT.fullmatch(text):
        return "there is no such folder. A commit must be built first."
    if "ollama" in text.lower() or "kobold" in text.lower():
        return "the lab runs llama.cpp's libraries, not Ollama or KoboldCpp."
    return "there is no such folder, and it is no version such as 0.3.20."


# Versions


def of_versions(good: str, bad: str, among: Sequence[str]) -> Series:
    """The versions of the index between two of them. Without the index, those in the cache."""
    notes: list[str] = []
    chosen = chosen_versions(among)
    try:
        versions = package_index.available()
    except LabError as problem:
        versions = package_index.built()
        if not {good, bad} <= set(versions):
            raise
        notes.append(f"{problem.what} Only versions in the cache are used.")
    for version in (good, bad, *chosen):
        if version not in versions:
            raise LabError(
                f"The package index has no version {version} of llama-cpp-python; its newest is "
                f"{versions[-1]}.",
                "Versions of Ollama or KoboldCpp are other numbers: the lab cannot run these.",
            )
    places = sorted((versions.index(good), versions.index(bad)))
    between = versions[places[0] : places[1] + 1]
    if chosen:
        between = [version for version in between if version in {good, bad, *chosen}]
    if between[0] != good:
        between.reverse()
    series = tuple(SeriesBuild(version, version=version) for version in between)
    return Series(series, tuple(notes))


def chosen_versions(among: Sequence[str]) -> list[str]:
    """The versions that --among names. LabError for anything else."""
    chosen = []
    for text in among:
        for part in text.split(","):
            version = names.version_of(part)
            if version is None:
                raise LabError(
                    f"--among {part}: this is no version of llama-cpp-python.",
                    "Name versions: --among 0.3.24,0.3.28. Or leave it out: all are used.",
                )
            chosen.append(version)
    return chosen


# Folders


def of_folders(good: SeriesBuild, bad: SeriesBuild, among: Sequence[str]) -> Series:
    """Folders between two of them: those that --among lists, or the builds in one folder."""
    if len(among) > 1:
        listed_builds = [named(text, "--among") for text in among]
        return in_given_order(good, bad, listed_builds)
    parent = among[0] if among else common_parent(good, bad)
    if parent is None:
        return Series((good, bad))
    candidates, notes = builds_in(parent)
    same = {names.flavour(good.label), names.flavour(bad.label)}
    of_other_kinds = [build for build in candidates if names.flavour(build.label) not in same]
    if len(same) == 1 and of_other_kinds:
        candidates = [build for build in candidates if build not in of_other_kinds]
        labels = [build.label for build in of_other_kinds]
        notes.append(f"Folders of another kind are left out: {shortened(labels)}.")
    every_build = {build.folder: build for build in [good, *candidates, bad]}
    return Series(between_ends(good, bad, list(every_build.values())), tuple(notes))


def in_given_order(
    good: SeriesBuild, bad: SeriesBuild, listed_builds: Sequence[SeriesBuild]
) -> Series:
    """The builds as --among lists them, between the ends."""
    between = [
        build for build in listed_builds if build.folder not in (good.folder, bad.folder)
    ]
    return Series((good, *between, bad))


def common_parent(good: SeriesBuild, bad: SeriesBuild) -> str | None:
    """The folder in which both were named; None: there is none."""
    parents = set()
    for build in (good, bad):
        assert build.folder
        for folder in (build.folder, *build.folder.parents):
            if folder.name == build.label:
                parents.add(folder.parent)
                break
    return str(parents.pop()) if len(parents) == 1 else None


def builds_in(parent: str) -> tuple[list[SeriesBuild], list[str]]:
    """The builds in the folders of a folder, and notes on what is none. LabError if it is none."""
    path = expanded(parent)
    if not is_dir(path):
        raise LabError(
            f"--among {parent}: there is no such folder.", "Name a folder of builds."
        )
    candidates = []
    archives = []
    for entry in listed(path.resolve())[:MOST_FOLDERS]:
        if is_dir(entry):
            folder = builds.with_libllama(entry)
            if folder:
                candidates.append(SeriesBuild(entry.name, folder=folder))
        elif entry.name.endswith(names.ARCHIVE) and names.build_number(entry.name):
            archives.append(entry.name)
    notes = []
    if archives:
        notes.append(f"Archives are not unpacked, and left out: {shortened(archives)}.")
    return candidates, notes


def between_ends(
    good: SeriesBuild, bad: SeriesBuild, candidates: Sequence[SeriesBuild]
) -> tuple[SeriesBuild, ...]:
    """The candidates from the good to the bad end. LabError if names do not say their order."""
    if len(candidates) == 2:
        return (good, bad)
    labels = [build.label for build in candidates]
    order = names.order_of(labels)
    if order is None:
        raise LabError(
            f"The order of these {plural(len(labels), 'folder')} is not known: "
            f"{shortened(labels)}. A name needs a build number (b9518), a date or a version, each "
            "once.",
            "Rename them, or list them in order: --among FOLDER --among FOLDER ...",
        )
    ordered = sorted(candidates, key=lambda build: order(build.label) or ())
    places = sorted((ordered.index(good), ordered.index(bad)))
    between = ordered[places[0] : places[1] + 1]
    if between[0] != good:
        between.reverse()
    if len(between) > MOST_BUILDS:
        raise LabError(f"{len(between):,} builds are too many.", "Name ends that are closer.")
    return tuple(between)


def shortened(labels: Sequence[str]) -> str:
    """The first labels, and how many more there are."""
    if len(labels) <= MOST_NAMED:
        return join_and(labels)
    return f"{', '.join(labels[:MOST_NAMED])} and {len(labels) - MOST_NAMED:,} more"


# What it takes to run one


def setup_of(build: SeriesBuild, watch: package_index.ShowBuild) -> ProcessSetup:
    """What the process of a build starts with. LabError if it cannot be built or loaded.

    A folder is run with the bindings that fit it: the installed ones, or those of a version in the
    cache.
    """
    if build.version:
        return ProcessSetup(package=str(package_index.build(build.version, watch)))
    lib = str(build.folder)
    problem: LabError | None = None
    packages: list[str | None] = [None]
    for version in reversed(package_index.built()):
        packages.append(str(package_index.path_of(version)))
    for package in packages:
        try:
            return ProcessSetup(lib=builds.folder_of(lib, package), package=package)
        except LabError as error:
            problem = problem or error
    assert problem
    raise LabError(
        problem.what,
        "Its bindings must be of about the same age. Those of every version that lab bisect built "
        "are tried: lab bisect --good VERSION --bad VERSION builds some.",
    )
