"""JSON schemas as the grammar engine can enforce them: what it knows is kept, what it does not know is named.

`normalise` is the one entrance. Front ends call it for the notes of what is not enforced, and whoever writes a grammar
for the schema it returns.
"""

from quire.text.schema.normal import Normal, normalise
from quire.text.schema.notes import SchemaNote
from quire.text.schema.output import with_schema_warnings

__all__ = ["Normal", "SchemaNote", "normalise", "with_schema_warnings"]
