"""Texts models write, in every tool-call format: well formed, sloppy and broken. Shared by the channel tests."""

from __future__ import annotations

from quire.text.channels import ToolSpec

WEATHER = ToolSpec(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "unit": {"type": ["string", "null"]},
            "when": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
            "any": {},
        },
        "required": ["city"],
    },
)
TIME = ToolSpec("clock.now", {"type": "object", "properties": {}})
TOOLS = (WEATHER, TIME)

DS = {"all": "<｜tool▁calls▁begin｜>", "end": "<｜tool▁calls▁end｜>", "call": "<｜tool▁call▁begin｜>",
      "stop": "<｜tool▁call▁end｜>", "sep": "<｜tool▁sep｜>"}  # fmt: skip

CASES: dict[str, list[str]] = {
    "none": ["", "Hello.", "<tool_call>{}</tool_call> stays text \n\n"],
    "hermes": [
        "",
        "Just text with a < and a <tool and a trailing space ",
        'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Aix", "n": [1, {"a": "}"}]}}\n'
        "</tool_call>\n",
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"arguments": {"x": "\\"<tool_call>"}, '
        '"name": "b", "id": "7"}</tool_call> and done. ',
        '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b", "arguments": null}]</tool_call>',
        '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": 1}</tool_call>after',  # a brace is missing
        '<tool_call>{"name": "a", "arguments": {"x": <oops>}}</tool_call> tail',
        "<tool_call> I would call a tool </tool_call> but do not. <<tool_call>> ",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": "never ends',
        '<tool_call>{"na',
        'x <tool_call>{"extra": [1, 2], "name": "a"}</tool_call>',
        '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {}} trailing words </tool_call>',
    ],
    "qwen3_coder": [
        "No call here, 1 < 2 and <function call>.",
        "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nAix \"en\"\nProvence\n\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=tags>\n[\"a\", \"b\"]\n</parameter>\n<parameter=unit>\nnull\n"
        "</parameter>\n<parameter=when>\nsoon\n</parameter>\n<parameter=any>\n{\"k\": 1}\n</parameter>\n"
        "<parameter=other>\n5\n</parameter>\n</function>\n</tool_call>\nDone.",
        "<tool_call>\n<function=clock.now>\n</function>\n</tool_call>\n<tool_call><function=get_weather>"
        "<parameter=city>Rome</parameter></function></tool_call>",
        "<function=get_weather>\n<parameter=city>\na < b </param> c\n</parameter>\n</function>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nA\n</parameter>\nwhat is this?</function></tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nnever ends",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n12",
        '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=get weather>",
    ],
    "llama3": [
        "Plain words.",
        '{"name": "get_weather", "parameters": {"city": "Aix"}}',
        '\n{"name": "get_weather", "parameters": {"city": "Aix"}}; {"name": "clock.now", "parameters": {}}\n',
        '{"name": "unknown", "parameters": {}}',
        '{"answer": {"name": "get_weather"}}',
        '{"type": "function", "name": "clock.now", "parameters": {}} and words',
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Aix"}}',
        'Searching <|python_tag|>brave_search.call(query="rain \\"now\\"", count=3, safe=True)',
        "<|python_tag|>print('hello')\n",
        '<|python_tag|>brave_search.call(query="never ends',
        "<|python_tag|>",
    ],
    "mistral": [
        "Words [TOOL and [TOOL_CALLS",
        '[TOOL_CALLS][{"name": "a", "arguments": {"x": "]"}, "id": "123456789"}, {"name": "b", "arguments": {}}]',
        'Text.\n[TOOL_CALLS] [{"name": "a", "arguments": {}}] after',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Aix"}[TOOL_CALLS]clock.now[ARGS]{}',
        '[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": {"a": [1]}} bye',
        '[TOOL_CALLS]get_weather{"city": "Aix"}',
        "[TOOL_CALLS] nothing like a call",
        '[TOOL_CALLS][{"name": "a", "arguments": {}}, oops]',
        "[TOOL_CALLS][1, 2]",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "never',
    ],
    "deepseek": [
        "Words <｜tool and <｜tool▁sep｜>",
        "Let me see.{all}{call}get_weather{sep}{{\"city\": \"Aix\"}}{stop}{call}clock.now{sep}{{}}{stop}{end}",
        "{all}{call}function{sep}get_weather\n```json\n{{\"city\": \"`\"}}\n```{stop}\n"
        "{call}function{sep}clock.now\n```json\n{{}}\n```{stop}{end}\nafter",
        "{call}get_weather{sep}{{\"a\": 1}}{stop}",
        "{all}nothing{end}",
        "{all}{call}get_weather{sep}words{stop}{end}",
        "{all}{call}get_weather{sep}{{\"a\": 1}} garbage {stop}{end}",
        "{all}{call}get_weather{sep}{{\"a\": ",
    ],
    "harmony": [
        "Plain words without a channel, 1 < 2.",
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Aix"}<|call|>',
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "A}"}<|call|><|start|>assistant'
        '<|channel|>commentary to=functions.clock.now <|constrain|>json<|message|>{}<|call|>',
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Aix", "days": 1',
        "<|channel|>commentary to=functions.clock.now <|message|>words<|call|>",
        "to=<functions>",
    ],
    "gemma4": [
        "Words < and <|tool and {x:1}",
        'I look.<|tool_call>call:get_weather{city:<|"|>Aix, "en" {<|"|>,days:3,tags:[<|"|>a<|"|>,<|"|>b<|"|>],'
        'any:{k:<|"|>v<|"|>,n:[1,{}]},unit:null,when:true}<tool_call|><|tool_call>call:clock.now{}<tool_call|>',
        '<|tool_call>call:get_weather{city:Aix}<tool_call|> after',
        '<|tool_call>call:get_weather{city:<|"|>never ends',
        "<|tool_call>words<tool_call|>",
        '<|tool_call>call:get_weather{<|"|>city<|"|>:<|"|>Aix<|"|>;}<tool_call|>',
        "<|tool_call>call:clock.now{" + "a:{" * 100,
    ],
    "pythonic": [
        "Words < and <|tool and f(x=1)",
        """I look.<|tool_call_start|>[get_weather(city='Aix, "en" )', days=3, tags=['a', "b"], any={'k': [1, None]},
        unit=None, when=True), clock.now()]<|tool_call_end|>Done.""",
        '<|tool_call_start|>[get_weather(city="A\\"x", days=-1.5)]<|tool_call_end|>',
        "<|tool_call_start|>[get_weather(city='never ends",
        "<|tool_call_start|>words<|tool_call_end|>",
        "<|tool_call_start|>[get_weather(city=oops(1))]<|tool_call_end|>",
        "<|tool_call_start|>get_weather(city=true)<|tool_call_end|>",
    ],
    "functionary": [
        "Words and >> and more",
        '>>>get_weather\n{"city": "Aix"}',
        'get_weather\n{"city": "Aix"}>>>clock.now\n{}',
        'get_weather\n{"city": ',
        "get_weather and words",
        ">>>unknown\n{}",
    ],
    "granite": [
        "Words <|tool and more",
        'I look.<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Aix"}}, {"name": "clock.now", '
        '"arguments": {}}]',
        '<|tool_call|> {"name": "clock.now", "arguments": {}}',
        "<|tool_call|>words",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "nev',
    ],
    "json": [
        "Plain words { not JSON }",
        '{"name": "get_weather", "arguments": {"city": "Aix"}}',
        ' [{"name": "get_weather", "arguments": {"city": "Aix"}}, {"arguments": {}, "name": "clock.now"}]\n',
        '{"name": "get_weather", "arguments": {}}\n{"name": "clock.now", "arguments": {}} and text',
        '{"name": "somebody", "age": 3}',
        '{"name": "get_weather", "city": "Aix"}',
        "[1, 2, 3]",
        '{"name": "get_weather"}',
        '{"name": "get_weather", "arguments": {"city": ',
        "",
    ],
}  # fmt: skip
CASES["deepseek"] = [text.format(**DS) if "{sep}" in text or "{all}" in text else text for text in CASES["deepseek"]]
CASES["mistral_list"] = CASES["mistral"]
CASES["deepseek_fenced"] = CASES["deepseek"]

REASONING = ["<think>\nHm, {body}\n</think>\n\n", "\n <think></think>", "<think> never closed {body}", "<thin", ""]
