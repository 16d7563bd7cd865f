"""Reduces JSON schemas to what the grammar engine enforces, and names the keywords that are left out.

`normalise` is the only entry point. Front ends use its notes, writers of grammars the schema it returns.
"""

from quire.text.schema.normal import Normal, normalise
from quire.text.schema.notes import SchemaNote
from quire.text.schema.output import with_schema_warnings

__all__ = ["Normal", "SchemaNote", "normalise", "with_schema_warnings"]
