"""What a model may call. `seam` is the protocol, `toolbox` the set of a session; each tool is a file of its own."""
