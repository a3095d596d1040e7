"""Which model may be loaded: a name that comes from a file is never downloaded or made for it."""

from __future__ import annotations

from lab.core.record import Model
from lab.errors import LabError
from lab.features.why.figure import Figure
from lab.models import catalog, obtain

REFUSED = (
    "the model {spec} is named by a file and is not on this machine; "
    "--model {spec} downloads or makes it"
)


def spec_of(figure: Figure) -> str | None:
    """The SPEC of a figure's model, if records name it."""
    if not figure.records:
        return None
    return catalog.spec_of(figure.records[0].model)


def recorded_spec(model: Model) -> str | None:
    """The SPEC of a record's model if its file is on this machine and is one of the lab's; else
    None.

    A record's path is not opened: it may come from a stranger.
    """
    try:
        spec = catalog.parse(catalog.spec_of(model))
        if spec.source == catalog.FILE or obtain.locate(spec) is None:
            return None
    except LabError:
        return None
    return spec.text


def allowed_spec(figure: Figure) -> str | None:
    """The SPEC of a figure's model if a trial may load it without asking."""
    if not figure.records:
        return None
    return recorded_spec(figure.records[0].model)


def refusal(*figures: Figure) -> str:
    """Why nothing can be measured: no model is named, or the one that a file names may not be
    loaded.
    """
    for figure in figures:
        spec = spec_of(figure)
        if spec and allowed_spec(figure) is None:
            return REFUSED.format(spec=spec)
    return "no model is named (--model SPEC)"
