"""Where a test goes: by what breaks when it fails, beside those of the same module.

formulas, against papers and by enumeration
    ``maths``            losses, estimators, credit, selection; vectors of the catalogue (``vectors``, ``vectors_data``, and
                         ``vector_adapters`` from their names to our functions); ``methods.yaml``, which says where each
                         method lives and which test shows it
    ``tokens``           chat templates, masks, tools as text
rows and verdicts, without a model
    ``data``             ingest and the human tasks: files in, rows or quarantine out
    ``world``            the embedded world, and the verifiers
models, in this process and tiny
    ``sampler``          engines: the built-in sampler, servers, vLLM
    ``training``         sft, distill, align, rl, rejection and the stages around them: their numbers, rules, resumption, ranks
    ``reward``           reward models, judges, rewards as components
    ``evaluation``       evaluate and what compares, selects and promotes
the platform
    ``platform``         identity, store, leases, records, the stage process, MLflow's projection, the arrows between layers
    ``crash``            stages killed at any instant
    ``flows``            recipes, and Prefect's and MLflow's real servers
    ``cli``              commands as a user types them, and what the READMEs say
against others
    ``peers``            TRL, verl and OpenRLHF on the same rows; ``bench``: speed and memory beside them (no tests)
    ``offline``          what keeps the tests' processes from reaching another machine

An end-to-end test of a stage stands in the package of its kind, one of a recipe in ``flows``.
Fixtures stand in the package's ``conftest.py``. What several packages use:

``common``          rows, and what they are written with
``toy_stage``       a stage small enough to kill a hundred times; ``epochs_stage``: one that publishes every epoch
``processes``       stage processes forked from warm parents
``serving``         a server while a test runs; ``chat_server``, ``hub_server``, ``raw_server``: servers with
                    others' interfaces, and one that answers with bytes
``architectures``   tiny models of many architectures
``formulas``        losses as their papers print them; ``oracles``: closed-form answers; none of it is the project's own
``production``      the project's code driven with plain numbers
``replay``          the same training by plain means
``sweep``           settings in combination
``second_device``   a device that takes every way that is taken on CUDA
"""
