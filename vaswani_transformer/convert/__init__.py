"""Models into and out of other tools: importers, an exporter to CTranslate2, and the command `vaswani-convert`."""
