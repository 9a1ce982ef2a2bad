"""Reward models: how one is trained, and how a trained one scores. Their formulas are in ``stages.losses``; as part of a
reward they are a component of ``stages.reward``.

``reward_objectives``  the objectives there are, one row each
``reward_data``        labelled rows of every kind as training items
``reward_heads``       a backbone with a linear head, and the card that says how to read it
``reward_losses``      losses as sums over a micro-batch
``reward_scorers``     trained ones at work: responses in, a calibrated number each
``reward_eval``        what one is worth on held-out rows
``candidates``         several on the same held-out rows, to choose one of them
``preference_module``  a group's preferences predicted from a few of its ratings
"""
