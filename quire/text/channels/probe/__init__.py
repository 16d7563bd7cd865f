"""Reads a model's formats off its chat template: renders probe conversations and finds the markers in the text."""

from quire.text.channels.probe.describe import describe_template
from quire.text.channels.probe.replay import Replay
from quire.text.channels.probe.result import TemplateFormats
from quire.text.channels.probe.views import TOOL_VARIABLES

__all__ = ["TOOL_VARIABLES", "Replay", "TemplateFormats", "describe_template"]
