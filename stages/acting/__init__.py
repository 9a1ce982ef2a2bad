"""A policy over several turns in an environment, as one growing token sequence. Completions of one turn are
``stages.generation``'s; what trajectories teach is said in ``stages.policy``.

``agents``         the policy in an environment: whole trajectories, with the tokens that are its own
``environments``   the interface of an environment, and episodes in killable processes
``tools``          tool calls as text, the tools that answer, the built-in environment of both
``verdicts``       a built-in environment: told right or wrong, the policy goes on writing
``agent_rewards``  from the events of an episode to a number per turn
"""
