"""The picture at the top of the README: an SVG in which a beam search grows step by step, below the best target so far.

The drawing is that of the page (`search-view.js`). Its colors follow the reader's light or dark theme, and readers who
prefer no motion see the end of the search. `python -m docs.tools.browser_pictures MODEL` writes it.
"""

from html import escape
from xml.etree import ElementTree

from vaswani_transformer.figures.recording import Recording

NAME = "translation"  # of the file docs/images/figure-translation.svg; no other drawing has its id
NAMESPACE = "{http://www.w3.org/2000/svg}"
THEMES = {
    "light": {"ground": "#ffffff", "ink": "#1f2328", "gray": "#636872", "blue": "#1f5fcc"},
    "dark": {"ground": "#0d1117", "ink": "#e6edf3", "gray": "#a0a6b0", "blue": "#7daaff"},
}
SECONDS, REST = 0.8, 4.0  # of a step, and of the last picture
FADE = 1.5  # percent of the whole in which a part appears
TOP, MARGIN = 104, 14  # pixels above the tree and at its left


def variables(theme: str) -> str:
    return "".join(f"--{name}:{color};" for name, color in THEMES[theme].items())


def still_style() -> str:
    """Return the colors, by the reader's theme."""
    return (
        f"#{NAME}{{{variables('light')}}}"
        f"@media (prefers-color-scheme:dark){{#{NAME}{{{variables('dark')}}}}}"
        f"#{NAME} .ground{{fill:var(--ground)}}#{NAME} .ink{{fill:var(--ink)}}"
        f"#{NAME} .gray{{color:var(--gray)}}#{NAME} .blue{{color:var(--blue)}}"
    )


def moving_style(steps: int) -> str:
    """Return the animation of a search: step n appears, target n is shown until the next, beams die."""
    whole = SECONDS * steps + REST
    starts = [100 * SECONDS * step / whole for step in range(steps)]  # percent
    frames = []
    for step, start in enumerate(starts, 1):
        end = starts[step] if step < steps else 100.0
        shown = f"{start:.2f}%{{opacity:0}}{start + 0.01:.2f}%,{end:.2f}%{{opacity:1}}"
        hidden = f"{end + 0.01:.2f}%,100%{{opacity:0}}" if step < steps else ""
        frames.append(f"@keyframes target{step}{{0%,{shown}{hidden}}}")
        frames.append(f"@keyframes step{step}{{0%,{start:.2f}%{{opacity:0}}{start + FADE:.2f}%,100%{{opacity:1}}}}")
        if step < steps:
            colors = f"{end:.2f}%{{color:var(--blue)}}{end + FADE:.2f}%,100%{{color:var(--gray)}}"
            frames.append(f"@keyframes dies{step}{{0%,{colors}}}")
    motion = f"#{NAME} [style]{{animation-duration:{whole:.1f}s;animation-iteration-count:infinite}}"
    return f"@media (prefers-reduced-motion:no-preference){{{motion}{''.join(frames)}}}"


def animate_parts(drawing: ElementTree.Element, steps: int) -> None:
    """Give the parts of a drawn search their colors at its end, and the names of their animations."""
    for part in drawing.iter(f"{NAMESPACE}g"):
        step, last = int(part.attrib.pop("data-step", 0)), int(part.attrib.pop("data-last", 0))
        for name in ("data-row", "color", "display"):
            part.attrib.pop(name, None)
        part.attrib["class"] = "blue" if last >= steps else "gray"
        if step:
            dies = [f"dies{last}"] if 0 < last < steps else []
            part.attrib["style"] = f"animation-name:{','.join([f'step{step}', *dies])}"


def targets(recording: Recording) -> list[str]:
    """Return the best target after each step; the last one is the translation."""
    return [*(step[0]["text"] for step in recording.data["steps"][:-1]), recording.target]


def line_of_text(y: int, size: int, content: str, attributes: str) -> str:
    return f'<text x="{MARGIN}" y="{y}" font-size="{size}" {attributes}>{escape(content)}</text>'


def animation(drawing: ElementTree.Element, recording: Recording) -> str:
    """Return the file of an animated search.

    Args:
        drawing: the page's SVG of the whole search.
        recording: the search, by `record_search`.
    """
    source, shown = recording.data["source"], targets(recording)
    width, height = (int(drawing.attrib[name]) for name in ("width", "height"))
    title = drawing.find(f"{NAMESPACE}title")
    if title is not None:
        drawing.remove(title)
    animate_parts(drawing, len(shown))
    ElementTree.register_namespace("", NAMESPACE.strip("{}"))
    tree = "".join(ElementTree.tostring(part, encoding="unicode") for part in drawing)
    lines = [line_of_text(34, 24, source, 'class="ink"')]
    for number, target in enumerate(shown, 1):
        opacity = "" if number == len(shown) else ' opacity="0"'
        style = f'class="ink" font-weight="700" style="animation-name:target{number}"{opacity}'
        lines.append(line_of_text(74, 28, target, style))
    size = f'viewBox="0 0 {width} {TOP + height}" width="{width}" height="{TOP + height}"'
    label = f"Beam search translates “{source}” as “{recording.target}”"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" id="{NAME}" {size} role="img" aria-labelledby="{NAME}-title" '
        'font-family="Helvetica, Arial, sans-serif" style="max-width: 100%; height: auto">',
        f'<title id="{NAME}-title">{escape(label)}</title>',
        f"<style>{still_style()}{moving_style(len(shown))}</style>",
        f'<rect class="ground" width="{width}" height="{TOP + height}" rx="8"/>',
        *lines,
        f'<g transform="translate(0 {TOP})">{tree}</g>'.replace(f'xmlns="{NAMESPACE.strip("{}")}" ', ""),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
