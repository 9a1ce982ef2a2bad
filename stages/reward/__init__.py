"""What an answer is worth: a named, weighted list of components, each scored and stored separately. Rules are in
``stages.verification``, trained scorers in ``stages.reward_models``.

In reading order:
``components``        what a component is: its kind and its settings
``verdicts``          what scoring gives: a value, or unscorable with a reason
``scorers``           how each kind scores
``rewards``           the weighted whole

Single kinds:
``programs``          what others wrote, in the sandbox: tests, reward functions, patterns
``process_rewards``   rewards at the ends of reasoning steps
``remote_rewards``    a reward model behind a URL
``judge``             a language model's opinion
``judging``           a judge between two answers, in both orders: what `judge` and `win_rate` share
``principles``        what answers are judged and revised by
``rubrics``           weighted items by category of prompt; ``rubric_reward``: responses scored by them; ``grape``: the arithmetic
``whole``             files whose rows only mean something together
``debate``            two seats of one policy before a judge
"""
