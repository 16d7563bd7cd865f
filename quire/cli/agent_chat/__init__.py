"""The agent's front ends of `quire chat`: `once` for scripts, `repl` for a terminal."""
