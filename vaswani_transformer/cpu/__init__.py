"""A model prepared for the CPU that it decodes on. Nothing here is published with a model."""

from .model import prepare_for_inference

__all__ = ["prepare_for_inference"]
