"""Where orchestration meets the machine learning: one Prefect task per stage, all thin over one shared body. What a
stage computes is in stages/, which stages run one after the other in flows/.

``stages``         the Prefect tasks, and what they show while a stage runs
``run``            their body, without Prefect: references, stage key, cached result, lease, process, publishing
``results``        the result of a stage as small JSON
``processes``      the stage's process: started, and ended with everything below it
``devices``        which devices a stage gets, and the slots for them
``nodes``          a stage on several machines
``together``       independent parts of a run side by side
``stopping``       how a stage ends early
``publishing``     outputs into the store, the record last
``promotion``      who is champion, and moving the alias
``training_data``  what a model and its ancestors learned from
``people``         steps that people take
``mirror``         metrics for a tracker of the user's own
"""
