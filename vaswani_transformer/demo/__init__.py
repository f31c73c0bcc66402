"""Web page on which a model translates in the browser, and shows how: the command `vaswani-demo MODEL`."""

from .site import load_site

__all__ = ["load_site"]
