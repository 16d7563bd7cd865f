"""CPU kernels in C++, compiled when the package is built: the reference ops, matrix products over quantized blocks, and
whole decoders in one call. `src/` holds the C++ code, `building` compiles it, `library` loads it; without a compiler
plain torch runs instead.
"""
