"""The adapters of an engine: which it has (`registry`), and which of them the device holds (`slots`)."""
