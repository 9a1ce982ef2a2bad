"""The machine learning: a stage is a module with SPEC and ``run(stage)``, named in ``stages.registry``. It runs in a
process of its own (``python -m stages SPEC.json``) and knows neither Prefect nor MLflow.

What all stages lean on:
``spec``        what a stage declares, and the key of a stage run; ``sources``: what the code says, for that key
``registry``    the stages there are
``settings``    settings that several stages share
``harness``     all that a stage knows of the world
``chat``        messages to token ids and loss masks: the one renderer
``generation``  prompts in, scored completions out: what rejection sampling, RL and evaluation share

What training leans on:
``batching``    from rows to micro-batches
``training``    one loop, one optimizer step
``preflight``   before the first step: the plan, five rows, the dearest micro-batch
``samples``     what a policy answers before and after training, for the report
``validation_alarms``  what a stage warns of while it trains, at its validation passes
``algorithms``  methods as rows of tables
``losses``      losses as plain functions
``estimators``  advantages, returns, baselines, KL controllers as plain functions
``selection``   choosing completions by their scores
``pairs``       preference rows as items
``token_spans`` two tokenisations of one text side by side
``in_context``  scores by demonstrations in the prompt, without training
"""
