"""The tool-call formats by name: layouts as presets, and the formats that no layout can express, each in its file."""

from __future__ import annotations

from quire.text.channels.formats.bare_json import BareJson
from quire.text.channels.formats.functionary import Functionary
from quire.text.channels.formats.gemma4 import Gemma4
from quire.text.channels.formats.harmony import Harmony
from quire.text.channels.formats.llama3 import Llama3
from quire.text.channels.formats.presets import PRESETS, GraniteList
from quire.text.channels.formats.pythonic import Pythonic
from quire.text.channels.formats.seam import TaughtFormat, ToolFormat

# Formats that probing can't tell, in the order in which they are asked.
HAND_WRITTEN: tuple[TaughtFormat, ...] = (
    Harmony(),
    Gemma4(),
    Pythonic(),
    Functionary(),
    GraniteList(),
    Llama3(),
)
_ALL: tuple[ToolFormat, ...] = (*PRESETS, *HAND_WRITTEN, BareJson())
FORMATS: dict[str, ToolFormat] = {found.name: found for found in _ALL}
