"""The part of `quire doctor` that shows a model's formats of tool calls and reasoning, and how they were found."""

from __future__ import annotations

from typing import Any

from quire.config import Config
from quire.config_build import override_config
from quire.types import QuireError


def doctor_formats(config: Config) -> dict[str, Any]:
    """Return what was read off the model's chat template, or why nothing was. Uses no network."""
    try:
        from quire.startup.cache_plan import find_files
        from quire.text.conversation import read_formats
        from quire.text.loading import load_tokenizer
        from quire.text.template import template_for

        tokenizer = load_tokenizer(find_files(override_config(config, {"offline": True}), None))
        if tokenizer is None:
            return {"ok": False, "notes": ["The model has no tokenizer."]}
        template = template_for(tokenizer, config.model.chat_template)
        formats = read_formats(template, config.server.tool_format)
    except QuireError as error:
        return {"ok": False, "notes": [error.what]}
    except Exception as error:  # one failed part must not cost the rest of the report
        return {"ok": False, "notes": [f"{type(error).__name__}: {error}."]}
    return {"ok": True, "notes": list(formats.notes)}
