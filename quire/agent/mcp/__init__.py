"""Tools from MCP servers: `config` reads which, `host` keeps the connections, `tools` makes tools of what they offer.

The SDK is the extra `agent`; without it a configured server is one line that says so.
"""
