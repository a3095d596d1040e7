"""Settings as command-line options: those that reproduce a record, and those that `lab tune --save
NAME` found."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.core import files, sampling, shell
from lab.core.asked_settings import SLEEP, AskedSettings, flag, table
from lab.core.experiments import experiment_runs
from lab.core.lines import from_json, to_json
from lab.core.record import Record, Settings
from lab.core.results import write_whole
from lab.errors import LabError
from lab.models import catalog
from lab.runner import machine

FOLDER = "LAB_SETTINGS"  # the environment variable that names another folder of saved settings
MOST_BYTES = 100_000  # of a file of settings


def keywords_of(settings: Settings) -> dict[str, object]:
    """The keywords of AskedSettings that ask for these settings, without defaults."""
    keywords: dict[str, object] = {}
    for name, setting in table().items():
        value = getattr(settings, setting.recorded)
        if value is not None and value != setting.default:
            keywords[name] = value
    if settings.n_threads_batch == settings.n_threads:
        keywords.pop("threads_batch", None)
    if settings.n_threads < 1:  # imported
        keywords.pop("threads", None)
    if settings.n_gpu_layers < 0:  # all of a model that does not say how many it has
        keywords.pop("n_gpu_layers", None)
    if settings.lib:
        keywords["lib"], _, _ = settings.lib.rpartition(" ")  # without the checksum
    if settings.thread_wait == SLEEP or isinstance(settings.thread_wait, int):
        keywords["wait"] = settings.thread_wait  # also if the user's environment asked for it
    keywords.pop("kv_unified", None)
    if settings.kv_unified:
        keywords["kv_unified"] = "on"
    return keywords | sampling.keywords(settings.sampling)


def options(record: Record) -> list[tuple[str, ...]]:
    """The model and the settings of a record as options, without defaults."""
    model = record.model
    settings = record.settings
    keywords = keywords_of(settings)
    usual_layers = 0
    if machine.accelerators(record.machine.devices):
        usual_layers = -1 if model.n_layer is None else model.n_layer + 1
    if settings.n_gpu_layers == usual_layers:
        keywords.pop("n_gpu_layers", None)
    if model.source == catalog.SYNTHETIC:
        keywords.pop("prompt", None)  # always random
    experiment = record.run.experiment
    if experiment and experiment_runs(experiment).kv_unified == "on":  # by default
        keywords["kv_unified"] = "on" if settings.kv_unified else "off"
    chosen: list[tuple[str, ...]] = []
    spec = catalog.spec_of(model)
    if spec != catalog.DEFAULT:
        chosen.append(("--model", spec))
    for name, value in keywords.items():
        chosen.append(option(name, value))
    return chosen


def option(name: str, value: object) -> tuple[str, ...]:
    """An option with its value, or --NAME or --no-NAME for an on/off setting."""
    if isinstance(value, bool):
        if name in table() and table()[name].choices:
            return flag(name), "on" if value else "off"
        return (flag(name),) if value else (flag(f"no-{name}"),)
    if isinstance(value, (tuple, list)):
        return flag(name), ",".join(map(_item, value))
    return flag(name), str(value)


def _item(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def timed(records: Sequence[Record]) -> list[Record]:
    """The records without warm-ups; all of them where there are only warm-ups."""
    return [record for record in records if not record.run.warmup] or list(records)


def shared(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The options that all of the records have."""
    common = options(records[0])
    for record in records[1:]:
        options_of_record = options(record)
        common = [option for option in common if option in options_of_record]
    return common


def line(
    name: str,
    keywords: Mapping[str, object],
    first: Sequence[Sequence[str]] = (),
    last: Sequence[Sequence[str]] = (),
) -> str:
    """A command with options, without those that are None or empty.

    `first` and `last` are arguments before and after them.
    """
    arguments = list(first)
    for key, value in keywords.items():
        if value not in (None, "", []):
            arguments.append(option(key, value))
    return shell.lab(name, *itertools.chain(*arguments, *last))


def folder() -> Path:
    """Where the files are: $LAB_SETTINGS, or a folder in the user's configuration folder."""
    import platformdirs

    chosen = os.environ.get(FOLDER)
    if chosen:
        return files.expanded(chosen)
    find = functools.partial(platformdirs.user_config_path, "mini-lab", False, roaming=True)
    return files.user_folder(find, FOLDER) / "settings"


def save(name: str, settings: Mapping[str, object]) -> Path:
    """Keep settings (keywords of AskedSettings) under a name, in the place of earlier ones; returns
    the file."""
    path = path_of(name)
    text = to_json({key: value for key, value in settings.items() if value is not None})
    _parse(text, f"Settings cannot be saved as {name}", "Correct them.")
    try:
        write_whole(path, f"{text}\n".encode(), "The file")
    except LabError as problem:
        hint = f"Free some space, or set {FOLDER} to another folder."
        raise LabError(problem.what, hint) from None
    return path


def settings(name: str) -> dict[str, object]:
    """The settings saved under a name, as keyword arguments.

    LabError if there are none, or if the file is broken.

        lab.measure(**lab.settings("fast"))
    """
    path = path_of(name)
    if not files.exists(path):
        hint = "None are saved yet: lab tune --save NAME saves some."
        names = [path.stem for path in files.listed(folder(), "*.json")]
        if names:
            hint = f"Saved are: {', '.join(names)}."
        raise LabError(f"There are no settings named {name}.", hint)
    text = files.read_text(path, "The settings", f"Correct or delete {path}", MOST_BYTES)
    return _parse(text, f"The settings {name} cannot be used", f"Correct or delete {path}")


def path_of(name: str) -> Path:
    """The file of a name. LabError for a name that is no file name on every system."""
    if not re.fullmatch(r"\w[\w.-]{0,63}", name, re.ASCII):
        hint = "Use up to 64 letters, digits, and . _ - after the first."
        raise LabError(f"{name!r} cannot name settings.", hint)
    return folder() / f"{name}.json"


def _parse(text: str, what: str, hint: str) -> dict[str, object]:
    """LabError, beginning with `what`, if `text` is not JSON of valid settings."""
    try:
        saved = from_json(AskedSettings, text)
        names = json.loads(text).keys()
        unknown = names - table().keys()
        if unknown:
            raise ValueError(f"this lab has no setting {', '.join(sorted(unknown))}")
        saved.check()
    except ValueError as problem:
        raise LabError(f"{what}: {problem}.", hint) from None
    except LabError as problem:
        raise LabError(f"{what}: {problem.what}", hint) from None
    return {name: getattr(saved, name) for name in names}
