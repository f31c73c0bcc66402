"""English-to-Spanish sentences that a small grammar makes, so that a first training run needs no download.

`lexicon` and `function_words` hold the words, `verbs` and `phrases` make them agree, `grammar` builds sentences from
them, and `splits` makes the data set.
"""
