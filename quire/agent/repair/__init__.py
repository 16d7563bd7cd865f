"""Reads tool calls that a model wrote in a wrong form: repaired where only one reading is possible, else refused.

`lenient_json` parses, `payloads` finds calls in text, `call_shapes` takes names and arguments out of values,
`arguments` checks them against a tool's schema, and `reading` joins them for the loop. A guess is never executed.
"""
