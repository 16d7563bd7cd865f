"""The agent at a terminal: `session` reads and dispatches, `commands` are the slash commands, `screen` shows events,
`markdown` streams answers, `approval` asks, `line_editor` and `completion` read lines, `status` is the line below."""
