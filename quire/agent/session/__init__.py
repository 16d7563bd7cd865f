"""Conversations on disk: append-only files of JSON lines that survive a kill at any moment.

`records` says what a line may hold and what it changes, `log` writes and reads files, `store` finds them, `export`
writes them for people.
"""
