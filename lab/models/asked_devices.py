"""The devices of an option `--device`: a list of names, of words that describe them, and of
datasheets of the lessons."""

from __future__ import annotations

import dataclasses

from lab.core.arguments import Texts
from lab.core.asked_settings import parts
from lab.models import described, own_sheet
from lab.models.devices import DeviceSheet

HERE = "this machine"


def names_in(text: Texts) -> list[str]:
    """The names in a list with commas; "here" is this machine."""
    names = []
    for name in parts(text):
        if name.lower() == "here":
            name = HERE
        names.append(name)
    return names


def names_of_devices(text: Texts) -> list[str]:
    """The names in a list with commas; a part that only adds facts belongs to the one before it.

    "13900K, DDR5-6400" is one device.
    """
    names = list[str]()
    for name in names_in(text):
        if names and name != HERE and described.is_addition(name):
            names[-1] = f"{names[-1]} {name}"
        else:
            names.append(name)
    return names


def device_called(name: str) -> DeviceSheet:
    """The device of a name, of words, or of a datasheet of the lessons. LabError for others."""
    if not own_sheet.is_sheet(name):
        return described.find(name)
    sheet = own_sheet.read(name)
    device = described.find(sheet.device(name))
    return dataclasses.replace(device, name=name, about=sheet.machine or name)
