"""One small file per family of models, and `harness`, which proves each of them equal to `transformers`."""
