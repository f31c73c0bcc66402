"""Trees for tests of parsing: a strategy for any well-formed one, and a small treebank with predictions."""

from hypothesis import strategies as st

from vaswani_transformer.parsing import Leaf, Tree, read_trees
from vaswani_transformer.parsing.trees import ROOT, ROOTS

LABEL_CHARACTERS = st.characters(exclude_characters="() \t\r\n\f\v", exclude_categories=["Cs", "Cc"])
TEXTS = st.text(LABEL_CHARACTERS, min_size=1, max_size=5)
LABELS = st.one_of(st.sampled_from(["S", "NP", "VP", "PRT", "ADVP", "NP-SBJ", "X"]), TEXTS).filter(
    lambda label: label not in ROOTS
)
LEAVES = st.builds(Leaf, LABELS, TEXTS)
NODES = st.recursive(
    LEAVES, lambda nodes: st.builds(Tree, LABELS, st.lists(nodes, min_size=1, max_size=4).map(tuple)), max_leaves=12
)
TREES = st.lists(NODES, min_size=1, max_size=3).map(lambda nodes: Tree(ROOT, tuple(nodes)))

# Gold and predicted trees, made for these tests: labels and spans that differ, ADVP for PRT, a unary chain, a repeated
# bracket, punctuation within and at the end, a wrong tag, a sentence of punctuation, and one whose trees differ in what
# is punctuation.
GOLD = """\
(TOP (S (NP (DT The) (NN dog)) (VP (VBD slept)) (. .)))
(TOP (S (NP (PRP She)) (VP (VBD gave) (PRT (RP up)) (PP (IN on) (NP (PRP it)))) (. .)))
(TOP (S (`` ``) (S (NP (NNS Cats)) (, ,) (ADVP (RB too)) (, ,) (VP (VBP purr))) ('' '') (, ,) \
(NP (PRP he)) (VP (VBD said)) (. .)))
(TOP (NP (NP (NN rain)) (PP (IN in) (NP (NP (DT the) (NN town)) (PP (IN of) (NP (NNP York)))))))
(TOP (S (S (VP (VB Go))) (: ;) (S (VP (VB stay) (ADVP (RB here)))) (. !)))
(TOP (FRAG (: --) (. ...)))
(TOP (S (NP (NN price) (: -) (NN war)) (VP (VBZ goes) (PRT (RP on)))))
"""
PREDICTED = """\
(TOP (S (NP (DT The) (NN dog)) (VP (VBD slept)) (. .)))
(TOP (S (NP (PRP She)) (VP (VBD gave) (ADVP (RB up)) (PP (IN on)) (NP (PRP it))) (. .)))
(TOP (S (`` ``) (NP (NNS Cats) (, ,)) (S (ADVP (RB too)) (, ,) (VP (VBP purr)) ('' '')) (, ,) \
(NP (PRP he)) (VP (VBD said) (. .))))
(TOP (NP (NP (NP (NN rain)) (PP (IN in) (NP (DT the) (NN town)))) (PP (IN of) (NP (NNP York)))))
(TOP (S (S (S (VP (VB Go)))) (: ;) (S (VP (VP (VB stay)) (ADVP (RB here)))) (. !)))
(TOP (FRAG (: --) (. ...)))
(TOP (S (NP (NN price) (HYPH -) (NN war)) (VP (VBZ goes) (PRT (RP on)))))
"""


def read(text: str) -> list[Tree]:
    """Return the trees of a text."""
    return [tree for _, tree in read_trees(enumerate(text.splitlines(), start=1), "text")]
