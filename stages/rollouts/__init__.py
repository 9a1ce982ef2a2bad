"""Where RL's training items come from: one iteration of rollouts, in the order in which it happens.

    prompts ── which come next: order, levels, rerank, pass@k, difficulty band          :class:`.prompts.PromptOrder`
       │
    groups ─── G completions of each by the policy (:mod:`.policy`), scored; batches     :class:`.groups.GroupSampler`
       │       without a signal drawn again; older groups instead (:mod:`.replay`), or a record's (:mod:`.recorded`,
       │       whose trajectories are played again: :mod:`.tape`)
    crediting  log-probs, values, shaped rewards, advantages, filters: items             :class:`.crediting.Crediting`
       │       (log-probs: :mod:`.logprobs`; values of reasoning steps: :mod:`.steps`; metrics: :mod:`.metrics`;
       │       rewards that compare answers: :mod:`.comparisons`; what a teacher reads: :mod:`.reprompts`)
    records ── rollouts/1, prompt_stats/1, trajectories/1, rubric and validation rows    :class:`.records.Records`

:class:`.source.Rollouts` joins them: the source of the training loop, which collects an iteration when the last one is
used up (:mod:`.ahead`: while the last one is trained on), hands it out in minibatches (:mod:`.minibatches`) and holds the
state. Validation passes sample by the same parts and measure what :mod:`.beside` says. Every part with state has
``state()`` and ``restore(state)``; killed at any instant, a run repeats the iteration that it was in. What passes between
the parts is a list of :class:`.groups.Group` and a :class:`.crediting.Scored`. What rewards are worth to a token, and the
loss, are in ``stages.policy``.
"""
