"""A model prepared for the CPU that it decodes on. Nothing here is published with a model."""
