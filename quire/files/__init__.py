"""What lies on disk and how it gets there. Import the modules: nothing heavy happens until one is used."""
