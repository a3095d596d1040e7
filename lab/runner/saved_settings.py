"""Settings with a name: what `lab tune --save NAME` found, for `--settings NAME` and `lab.settings("NAME")`.

Each name is a JSON file in the user's configuration folder, or in $LAB_SETTINGS. It holds settings by their names in
`AskedSettings`, and in words what they were found for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core.asked_settings import AskedSettings, SettingsKeywords, table
from lab.core.lines import from_json, to_json
from lab.core.results import write_whole
from lab.errors import LabError

FOLDER = "LAB_SETTINGS"
"""The environment variable that names another folder."""


@dataclass(frozen=True)
class Saved:
    """The content of a file. `about`: the model, the machine and the work that the settings were found for."""

    about: str
    settings: SettingsKeywords


def folder() -> Path:
    """Where the files are: $LAB_SETTINGS, or mini-lab/settings in the user's configuration folder."""
    import platformdirs

    if chosen := os.environ.get(FOLDER):
        return Path(chosen)
    return platformdirs.user_config_path("mini-lab", appauthor=False, roaming=True) / "settings"


def save(name: str, settings: Mapping[str, Any], about: str) -> Path:
    """Keep settings (keywords of AskedSettings) under a name, instead of earlier ones of that name; returns the file.

    LabError for a name with odd characters, for invalid settings, and if the file cannot be written.
    """
    path, given = path_of(name), {key: value for key, value in settings.items() if value is not None}
    text = to_json({"about": about, "settings": given})
    _parse(text, f"Settings cannot be saved as {name}", "Correct them.")
    try:
        write_whole(path, f"{text}\n".encode(), "The file")
    except LabError as problem:
        raise LabError(problem.what, f"Free some space, or set {FOLDER} to another folder.") from None
    return path


def read(name: str) -> Saved:
    """The settings saved under a name, every value checked. LabError if there are none, or if the file is broken."""
    path = path_of(name)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in folder().glob("*.json")))
        hint = f"Saved are: {known}." if known else "None are saved yet: lab tune --save NAME saves some."
        raise LabError(f"There are no settings named {name}.", hint) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise LabError(f"The settings {name} cannot be read: {problem}.", f"Correct or delete {path}") from None
    return _parse(text, f"The settings {name} cannot be used", f"Correct or delete {path}")


def settings(name: str) -> dict[str, Any]:
    """The settings saved under a name, as keyword arguments. LabError as for `read`.

    lab.measure(**lab.settings("fast"))
    """
    return {**read(name).settings}


def path_of(name: str) -> Path:
    """The file of a name. LabError for a name that is no file name on every system."""
    if not re.fullmatch(r"\w[\w.-]{0,63}", name, re.ASCII):
        raise LabError(f"{name!r} cannot name settings.", "Use up to 64 letters, digits, and . _ - after the first.")
    return folder() / f"{name}.json"


def _parse(text: str, what: str, hint: str) -> Saved:
    """LabError, beginning with `what`, if `text` is not JSON of Saved with valid settings."""
    try:
        saved = from_json(Saved, text)
        if unknown := sorted(json.loads(text)["settings"].keys() - table().keys()):
            raise ValueError(f"this lab has no setting {', '.join(unknown)}")
        AskedSettings(**saved.settings).check()
    except ValueError as problem:
        raise LabError(f"{what}: {problem}.", hint) from None
    except LabError as problem:
        raise LabError(f"{what}: {problem.what}", hint) from None
    return saved
