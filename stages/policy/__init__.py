"""Reinforcement learning apart from collecting rollouts (``stages.rollouts``): what its settings mean together, what
rewards are worth to each token, and what a step minimises. Algorithms are rows of ``stages.algorithms.RL_PRESETS``.

What is asked for:
``settings``          every setting of `rl`
``presets``           from the settings to the resolved row of the table of algorithms
``combinations``      which axes and constants go together
``read_when``         which settings, inputs and alarms anything reads
``held_models``       the models that a run holds: for the memory plan, and loaded

What is learned:
``members``           who is in a prompt's group besides plain samples
``credit``            from the rewards of a rollout batch to an advantage per token
``policy_update``     what one optimizer step minimises
``sequence_losses``   pairwise and offline losses on whole sequences
``critics``           the value function
``trust_region``      TRPO's step
``schedules``         what changes over a run by its step count

What a person sees:
``alarms``            warnings that say what to do
``rl_report``         curves and samples
"""
