"""Hostile variants of valid files, each decided by a seed: edited bytes, and JSON with other values."""

import copy
import json
import random
from typing import Any

LONG_LINE = 10_000_000  # bytes
LONG_LINES = 2000  # one case in so many has a long line

TOKENS = (
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\r\n", b"\n", b"\n\n", b"\t", b" ", b"\x1a", b"\x1b[2J", b"\x85"),
    *(b"\xc0\x80", b"\xed\xa0\x80", b"\\ud800", b"\\udfff\\ud800", b"\\u0000", b"%s%n", b"#version", b"-LRB-"),
    *(text.encode() for text in ("\u2028", "\u2029", "\x85", "\u202e\u2066", "e" + "\u0301" * 300, "\u00a0\u3000")),
    *(b"<script>alert(1)</script>", b"</bdi><img src=x onerror=alert(1)>"),
    *(b"-->", b"]]>", b"{{payload}}", b"{{ name }}"),
    *(b"```\n", b"\n# ", b"|", b"`", b"[x](javascript:x)", b"../../../etc/passwd", b"~/x", b"/", b"NaN", b"-Infinity"),
    *(b"1e999", b"-1", b"0", b"9" * 400, b"9" * 5000, b"1" + b"0" * 18, b"null", b"true", b'"', b"'", b"\\"),
    *(b"{", b"}", b"[", b"]", b"(", b")", b"()", b"[" * 5000, b"{" * 3000, b"(" * 20_000, b"((a b)" * 200),
    *(b'{"a":' * 2000, b"&a [*a]", b"<<: *a", b"!!python/object/apply:os.system [x]", b"- " * 2000, b"(-NONE- *)"),
)
"""What readers trip over: controls, broken and long characters, markup, paths, absurd numbers, brackets."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 0.5, 2**31, 2**31 - 1, 2**63, 10**9, 10**30, -(10**18), 1e308, 5e-324),
    *(float("nan"), float("inf"), "", "x", "1", "\0", "\ud800", "\u202e", "a\nb", "</script>", "../../../etc/passwd"),
    *("/etc/passwd", "x" * 10_000, [], {}, [[]], [None], [1, "x"], {"a": {}}, [0] * 3000, {"type": "x"}),
)
"""Values of JSON that a field does not expect."""


def deep(levels: int) -> list[Any]:
    """Return a list within a list, and so on."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def edit(content: bytes, draw: random.Random) -> bytes:
    """Return bytes with one change at a random place."""
    start = draw.randrange(len(content) + 1)
    end = min(len(content), start + draw.choice((1, 2, 8, 64, 1024)))
    match draw.randrange(8):
        case 0 if start < len(content):
            return content[:start] + bytes([content[start] ^ 1 << draw.randrange(8)]) + content[start + 1 :]
        case 1:
            return content[:start] + content[end:]
        case 2:
            return content[:end] + content[start:end] * draw.choice((1, 2, 50)) + content[end:]
        case 3:
            return content[:start] + draw.randbytes(draw.choice((1, 2, 4, 16))) + content[end:]
        case 4:
            return content[:start]
        case 5:
            lines = content.split(b"\n")
            draw.shuffle(lines)
            return b"\n".join(lines)
        case _:
            return content[:start] + draw.choice(TOKENS) + content[draw.choice((start, end)) :]


def edit_bytes(content: bytes, draw: random.Random) -> bytes:
    """Return a variant of a file: mostly one to four edits, rarely a line of 10 MB."""
    for _ in range(draw.choice((1, 1, 1, 3))):
        content = edit(content, draw)
    if draw.randrange(LONG_LINES) == 0:
        start = draw.randrange(len(content) + 1)
        filling = draw.choice((b"a", b" ", b"(", b"[", b".", b"a ", b"\xcc\x81")) * (LONG_LINE // 2)
        content = content[:start] + filling + content[start:]
    return content


def edit_json(tree: Any, draw: random.Random) -> Any:
    """Return a variant of a JSON value: one to three members deleted, renamed, added or replaced."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 2, 3))):
        node, key = None, None
        below: Any = tree
        while isinstance(below, dict | list) and below and (node is None or draw.random() < 0.7):
            node, key = below, draw.choice(list(below) if isinstance(below, dict) else range(len(below)))
            below = node[key]
        value = deep(draw.choice((50, 2000))) if draw.randrange(40) == 0 else copy.deepcopy(draw.choice(VALUES))
        match draw.randrange(6):
            case 0 if node:
                del node[key]
            case 1 if isinstance(node, dict):
                node[draw.choice(("x", "", "__class__", "type", "auto_map", "\ud800"))] = node.pop(key)
            case _ if node is None:
                tree = value
            case _:
                node[key] = value
    return tree


def dump(tree: Any) -> bytes:
    """Return a value as JSON; one that is nested too deeply for Python as only its brackets."""
    try:
        return json.dumps(tree).encode()
    except RecursionError:
        return b"[" * 20_000


def json_bytes(tree: Any, draw: random.Random) -> bytes:
    """Return a variant of a JSON file, in half of the cases with edited values, else with edited bytes."""
    return edit_bytes(dump(tree), draw) if draw.random() < 0.5 else dump(edit_json(tree, draw))
