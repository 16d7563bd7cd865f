"""Notes about keywords that are not enforced, and refusals of schemas. Both name a keyword and a place."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.types import QuireError

MAX_NOTES = 64  # per schema
MAX_SHOWN = 120  # characters of a place or a value in a message


@dataclass(frozen=True, slots=True)
class SchemaNote:
    """A keyword that is not enforced."""

    keyword: str
    place: str  # a JSON pointer from the schema's root, `#/properties/tags`
    why: str

    def __str__(self) -> str:
        return f"'{self.keyword}' at {self.place} is not enforced: {self.why}"


@dataclass(slots=True)
class SchemaNotes:
    """Collects notes. In a strict schema the first one raises."""

    strict: bool
    notes: list[SchemaNote] = field(default_factory=list)

    def leave_out(self, keyword: str, place: str, why: str) -> None:
        note = SchemaNote(shown(keyword), shown(place), why)
        if self.strict:
            what = f"The schema's '{note.keyword}' at {note.place} can't be enforced: {why}."
            raise QuireError("invalid_schema", what, "Leave it out, or ask for the schema without strict.")
        if len(self.notes) < MAX_NOTES and note not in self.notes:
            self.notes.append(note)


def broken(keyword: str, place: str, why: str) -> QuireError:
    """The error for a keyword whose value is invalid."""
    what = f"The schema's '{shown(keyword)}' at {shown(place)} {why}."
    return QuireError("invalid_schema", what, "Correct it, or leave it out.")


def too_much(what: str) -> QuireError:
    return QuireError("grammar_too_complex", what, "Use a simpler schema.")


def below(place: str, *names: str | int) -> str:
    """The pointer of a part of the schema at `place`."""
    return "/".join([place, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])


def shown(text: object) -> str:
    """A client's text inside a message: one short line of printable ASCII, so that it fits a header."""
    line = str(text).encode("ascii", "backslashreplace").decode()
    line = "".join(character if " " <= character <= "~" else "?" for character in line)
    return line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN - 3]}..."
