"""Drawings as SVG. Their gray and blue are legible on white and on black; web pages lighten them in dark themes."""

from dataclasses import dataclass, field
from html import escape

GRAY = "#696c75"
BLUE = "#2f6fdb"


@dataclass
class Drawing:
    """An SVG picture to which texts and lines are added, at pixels from the upper left corner."""

    name: str
    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)
    definitions: str = ""

    def text(self, x: float, y: float, text: str, anchor: str = "middle", color: str = GRAY, size: int = 13) -> None:
        attributes = f'fill="{color}" font-size="{size}" text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>')

    def line(self, *points: tuple[float, float], color: str = GRAY, width: float = 1.3, marker: str = "") -> None:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width:.1f}"{marker}/>')

    def svg(self) -> str:
        """Return the picture as an element, which is also a complete file."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        style = 'font-family="Helvetica, Arial, sans-serif" style="max-width: 100%; height: auto"'
        label = f'role="img" aria-labelledby="{self.name}-title"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label} {style}>',
            f'<title id="{self.name}-title">{escape(self.title)}</title>',
        ]
        if self.definitions:
            lines.append(f"<defs>{self.definitions}</defs>")
        return "\n".join([*lines, *self.parts, "</svg>"]) + "\n"
