"""A tree drawn as text."""

from .trees import Leaf, Tree


def draw_tree_text(tree: Tree) -> str:
    """Return a drawing of a tree: a line for each constituent and each word, which box characters join."""
    lines = [tree.label]
    stack = [(child, "", index == 0) for index, child in enumerate(tree.children[::-1])]
    while stack:
        node, indent, is_last = stack.pop()
        branch = "└── " if is_last else "├── "
        lines.append(
            f"{indent}{branch}{node.tag} {node.word}" if isinstance(node, Leaf) else indent + branch + node.label
        )
        if isinstance(node, Tree):
            inner = indent + ("    " if is_last else "│   ")
            stack.extend((child, inner, index == 0) for index, child in enumerate(node.children[::-1]))
    return "\n".join(lines)
