"""Model files: their formats, the local store, and downloads. Import the modules; this package imports none."""
