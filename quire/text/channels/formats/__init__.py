"""The tool-call formats by name. A new format is a file in this folder and a line in `_ALL`."""

from __future__ import annotations

from quire.text.channels.formats.bare_json import BareJson
from quire.text.channels.formats.deepseek import DeepSeek
from quire.text.channels.formats.hermes import Hermes
from quire.text.channels.formats.llama3 import Llama3
from quire.text.channels.formats.mistral import Mistral
from quire.text.channels.formats.qwen3_coder import Qwen3Coder
from quire.text.channels.formats.seam import ToolFormat

# In the order in which templates are matched: specific formats before general ones.
_ALL: tuple[ToolFormat, ...] = (
    Qwen3Coder(),
    Hermes(),
    Mistral(),
    Mistral(is_list=True),
    DeepSeek(),
    DeepSeek(is_fenced=True),
    Llama3(),
    BareJson(),
)
FORMATS: dict[str, ToolFormat] = {found.name: found for found in _ALL}
