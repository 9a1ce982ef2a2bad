"""What an answer is worth: verifiers, reward models, judges, rubrics, debates and programs as components of one reward.

In reading order: components.py (settings of a component), verdicts.py (what scoring gives), scorers.py and programs.py
(how each kind scores), rewards.py (the weighted whole); the other modules hold one kind each.
"""
