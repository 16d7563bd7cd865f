"""Work whose cost grows with clients' text: templates, tokenizing, validation of large bodies.

`tasks` defines and runs the tasks. `pool` sends them to worker processes with limits on time and memory, which protects
the event loop and the HTTP process's memory from any input. `process` is the worker's side.
"""
