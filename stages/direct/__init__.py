"""Direct alignment, as stage `align` trains it: losses on preference data without a reward model or sampling. The methods
are rows of ``stages.algorithms.DIRECT_METHODS``; DPO's own loss is in ``stages.losses``.

``preference_items``  preference data of every kind as training items
``direct_alignment``  the objective: one row of the table of methods on a micro-batch
``direct_losses``     losses beyond DPO, per pair
``combinations``      which settings go with which method, and which losses add up to one
``objective_code``    losses that are given as text: read and evaluated, never executed
"""
