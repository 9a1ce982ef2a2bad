"""Candidates: completions of prompts with their rewards (``candidates/1``), as `rejection` makes them and chooses among
them. What samples and scores them is ``stages.generation``, which RL uses too.

``contexts``   system messages that prompts are answered behind
``sampling``   completions of every prompt, scored, block by block; with a hint where none was right
``rows``       a scored completion as a row, and why one is never kept
``stored``     those of earlier runs: joined, scored anew
``selecting``  which are kept: duplicates, selectors, what is written of them
``report``     selection against the pool, best-of-n curves
"""
