"""Recipes, the command line, the deployments and the presets. No mathematics and no paths of files: a recipe calls stages
(``tasks.stages``) and passes references. Importing this package imports nothing heavy, and has Prefect, MLflow and the
hub's clients send nothing, also where a recipe is called from Python.

Beside the recipes, which ``recipe`` names:
``recipe``          what recipes share: their table, the base of their settings, the run that they call stages through
``config``          presets, settings given by hand, and errors that say what to write instead; ``names``: names of other projects
``start``           what recipes on the embedded world share
``steps``           small moves that recipes share
``published``       what recipes with published settings share
``single``          a flow per stage

The command line (``commands/``, a file per group of commands):
``cli``             the program
``report``          what ls, show, status, lineage say; ``rows``: rows of a dataset for a person
``display``         progress while stages run; ``run_log``: what the log of a run says of an error
``stage_plan``      what a stage would do; ``outcome``: what a finished recipe prints; ``ledger``: what `cost` says
``compare``         two runs or evaluations side by side
``promotion``       which version of a name is in office, why, and on what numbers
``export``          a model or dataset out of the store
``remove``          what `posttrain rm` takes away
``chat``            a conversation with a model
``doctor``          checks of machine and state

Servers:
``services``        Prefect, MLflow and a worker of one state directory; ``keep``: started again when one dies
``deploy``          what is registered with Prefect; ``worker``: starts a worker
``prefect_server``, ``prefect_ui``, ``prefect_leases``: Prefect's server without its freezes and its analytics
``env``             the environment of everything that speaks Prefect or MLflow
"""

from flows.env import send_nothing

send_nothing()
