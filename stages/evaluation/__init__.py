"""Evaluation metrics as plain functions on records and strings (catalogue section D), on top of
``stages.measures.statistics``.

``scores``        from stored samples (``eval_samples/1``) to metrics with confidence intervals and paired tests
``protocol``      what must be equal before two scores may be compared
``likelihood``    log-probabilities of given responses: KL to a reference, likelihood of pairs
``sampling``      pass@k, avg@k, maj@k
``multiple_choice``  choices read by the likelihood of their letter or text
``few_shot``      examples before a question, and what another choice and order of them changes
``held_out_text`` perplexity and bits per byte
``tax``           every benchmark before and after, with paired errors
``overopt``       proxy against gold: curves, fits, divergence
``preference``    pairwise verdicts: judge bias, length-controlled win rate, Elo, Bradley-Terry rankings
``reward_model``  probes and transforms for scorers
``text``          what the answers look like: diversity, stock phrases, contrastiveness
``rewardbench``   subsets, sections and total of reward-model benchmarks
``best_of``       one right answer among several wrong ones: RewardBench 2, RM-Bench
``refusals``      refusals on safe, unsafe and mirrored prompts
``mt_bench``      questions of several turns, rated by a judge
``signs``         style, reasoning and diversity of a policy's answers
``asked``         a judge that is asked in words
``suites``        rules of multiple choice, alignment tax, refusals, token shift and other small suite rules

Importing the package imports numpy at most.
"""
