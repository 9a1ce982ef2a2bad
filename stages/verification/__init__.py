"""Whether an answer is right, by rule.

``verifiers``        a response against the gold answer of its row, by the kind of answer; ``golds``: that answer
``responses``        a response's thought and answer; ``languages``: which language a text is written in
``extraction``       the answer that a response gives
``equality``         whether two answers are the same value or text; ``symbolic``: whether two formulas are, by algebra
``normalisation``    one string form of mathematical answers; ``plain_numbers``, ``units``: numbers and what they measure
``constraints``      whether a text satisfies a constraint: those of ``ifeval``, and ``more_constraints``
``constraint_pool``  constraints drawn for a prompt
``choices``          multiple choice as text; ``answer_format``: how worked solutions end
``rule_rewards``     what counts and lengths are worth
"""
