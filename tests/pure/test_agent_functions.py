"""Python functions as tools: schemas from signatures, and what they return or raise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from quire.agent.assemble import AgentOptions, open_agent
from quire.agent.repair.arguments import fit_arguments
from quire.agent.tools.function import FunctionTool, tool
from quire.agent.tools.seam import Risk, ToolContext
from quire.types import QuireError
from tests.pure.scripted_engine import ScriptedEngine, calling


@tool
def weather(
    city: Annotated[str, "name of the city"],
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    tags: list[str] | None = None,
    extra: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Says what the weather is."""
    return {"city": city, "days": days, "unit": unit, "tags": tags}


def test_the_schema_comes_from_the_signature() -> None:
    assert (weather.name, weather.description, weather.risk) == ("weather", "Says what the weather is.", Risk.OUTSIDE)
    assert weather.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "name of the city"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            "extra": {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert weather("Aix")["days"] == 1  # it is still a function
    fitted = fit_arguments(weather.parameters, {"city": "Aix", "days": "3"}, "weather")
    assert weather.run(fitted, ToolContext()).content == '{"city": "Aix", "days": 3, "unit": "C", "tags": null}'


def no_type(a):  # type: ignore[no-untyped-def]
    return a


def star(*a: int) -> None: ...


def odd(a: Path) -> None: ...


@pytest.mark.parametrize("function", [no_type, star, odd])
def test_functions_that_a_model_can_not_call_are_refused(function: Any) -> None:
    with pytest.raises(QuireError, match=function.__name__):
        tool(function)
    with pytest.raises(QuireError, match="no name"):
        tool(name="a b")(weather)


def test_an_agent_calls_functions_and_survives_what_they_raise(tmp_path: Path) -> None:
    @tool(name="fails")
    def broken(text: str) -> str:
        """Fails."""
        raise KeyError(text)

    assert isinstance(broken, FunctionTool)
    calls = calling(("weather", {"city": "Aix"}), ("fails", {"text": "x"}))
    engine = ScriptedEngine([calls, "done"])
    options = AgentOptions(tmp_path, ["none"], [weather, broken], allow=["weather", "fails"], sessions=tmp_path)
    with open_agent(engine, options) as agent:
        assert agent.take("go").text == "done"
    contents = [one["content"] for one in engine.asked[1].messages if one["role"] == "tool"]
    assert contents[0].startswith('{"city": "Aix"') and contents[1] == "The tool failed: KeyError: 'x'"
