"""The ground floor: what is on disk, and its projection into MLflow. It knows no other layer, and nothing here trains.

Files:
``home``             the state directory (POSTTRAIN_HOME)
``files``            canonical JSON, digests, atomic writes
``work``             work directories of stages that are not finished
``leases``           one owner of a running stage at a time, and slots for GPUs

Datasets and models:
``schema``           Arrow schemas of every kind of row
``datasets``         directories of Parquet parts with a manifest
``checkpoints``      complete or absent, never partial
``store``            content-addressed datasets and models, and references to them
``registry``         names of models: versions, aliases, evidence of promotions
``records``          what was done: of stages, and of runs of recipes
``lineage``          what a dataset or model was made of
``removal``          room is made; what made a result stays known
``costs``            what stages used, times what it costs
``cards``            the card of what is exported; ``hub``: sending it there

MLflow:
``outbox``           what is to be told, and how far it was
``tracking``         when it is told: in the background, or caught up with
``projector``        which unit becomes which run
``mlflow_client``    the connection, and experiments
``mlflow_run``       one run: parameters, tags, inputs, curves, numbers of the end, artifacts
``mlflow_curves``    a stage's curves as they lie on disk
``mlflow_models``    logged models, and MLflow's registry
``mlflow_text``      names and notes
``mlflow_database``  MLflow's own database: made whole, moved with the home
``restored``         what a restored database lacks of what it was told
"""
