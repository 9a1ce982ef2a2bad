"""The embedded default world: a small instruction language with verifiable answers.

Read in this order: `lexicon` (words and facts), `skills` (kinds of task), `responses` (how good and bad
answers are written), `annotator` (who prefers what), `generate` (the data sets).
"""
