"""The embedded default world: a small instruction language with verifiable answers, for demos and tests. Stage `world`
writes what is generated here.

In reading order:
``lexicon``     words, and the facts that hold
``skills``      kinds of task
``responses``   how good and bad answers are written
``annotator``   who prefers what
``generate``    the data sets
``tool_tasks``  questions that need a tool
"""
