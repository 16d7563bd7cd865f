"""llama.cpp's `/infill`: `prompt` arranges the texts around a gap, `routes` answers."""
