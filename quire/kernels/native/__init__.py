"""CPU kernels in C++, compiled when the package is built: twins of the reference ops, products over quantized blocks,
and a whole dense model in one call. `src/` holds them, `building` compiles them, `library` loads them; without a
compiler nothing here loads and plain torch runs instead.
"""
