"""Work on clients' text whose cost grows with the text: templates, tokenizing, large bodies.

`tasks` says what such work there is and does it; `pool` has it done by worker processes with limits on time and memory,
so that the event loop and the HTTP process's memory are safe from any input; `process` is the worker's side.
"""
