"""The terminal agent: turns with tools, a sandbox, saved sessions. It reaches an engine through the public API only.

`engines` asks a model, `loop` runs turns, `tools` holds what a model may call, `sandbox` runs it, `session` keeps
conversations on disk, `repair` reads malformed calls, `mcp` connects MCP servers. `quire.cli.chat` is the front end.

This module stays empty of imports: the sandbox's processes import the package from below.
"""
