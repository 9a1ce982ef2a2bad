"""What evaluations measure and how they are compared (catalogue section D), on top of ``stages.measures``.

From prompts to numbers:
``settings``         what stage evaluate can be told, and what of it does not go together
``plan``             what is evaluated, under which protocol, in which units; the models that are loaded
``units``            one unit of work: answers, choices, pairs or texts as finished rows
``protocol``         what must be equal before two scores may be compared
``grader_code``      what of the code decides a verdict, definition by definition
``few_shot``         examples before a question, and what another choice and order of them changes
``forcing``          how long a model thinks, set from outside
``sampled``          answers that the evaluated policy samples
``given``            answers that somebody else made, and which prompt each is to
``grading``          how one answer is read, parsed and verified
``pairs``            held-out pairs, by likelihood, reward model or judge
``multiple_choice``  choices read by the likelihood of their letter or text
``held_out_text``    perplexity and bits per byte
``scores``           from stored samples (``eval_samples/1``) to metrics with confidence intervals and paired tests
``report``           what evaluate leaves behind: metrics, tables, warnings, charts, examples

Single benchmarks and questions:
``asked``            a judge that is asked in words
``mt_bench``         questions of several turns, rated by a judge
``refusals``         refusals on safe, unsafe and mirrored prompts
``bbq``              whether answers lean on stereotypes
``opinions``         whose opinions a model has
``perturbed``        whether right answers survive a change that should not matter
``conformance``      a specification checked clause by clause
``signs``            style, reasoning and diversity of a policy's answers
``shift``            how much alignment changed, token by token
``compute``          what more tokens and more samples buy
``rewardbench``      subsets, sections and total of reward-model benchmarks
``best_of``          one right answer among several wrong ones: RewardBench 2, RM-Bench

Side by side:
``halves``           one half of the prompts to choose a model on, one to test the choice on
``tax``              every benchmark before and after, with paired errors
``run_comparison``   two runs or evaluations: curves, held-out scores, answers

Importing the package imports numpy at most.
"""
