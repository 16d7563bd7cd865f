"""`quire quantize`: writes checkpoints in fewer bits, and measures what that costs.

`source` reads any checkpoint that Quire runs; `recipe` decides the type of each tensor; `calibration` collects what its
columns are multiplied with; `gptq` and `awq` round with these figures; `gguf_output` and `compressed_output` write;
`report` compares the result with the source.
"""
