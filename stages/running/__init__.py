"""The process around a stage and what it may lean on: ranks, forks, sandboxes, randomness. It is started and ended by
``tasks.processes``; what a stage sees of it is ``stages.harness``.

A stage's process:
``process``     it speaks JSON lines, ends with its parent, and says how it ended
``warm``        a parent that has imported what stages import, and forks one for every stage
``launch``      the ranks of a stage on several devices
``ranks``       who this rank is, and exact sums over all of them
``stopping``    asked to end, it first saves a checkpoint
``allocator``   what the C library does with freed memory
``cuda``        what torch has to be told on CUDA

Its work:
``randomness``  every random number as a function of its counters
``blocks``      values computed block by block, each once however often the stage is killed
``parallel``    rows to items on all cores
``usage``       tokens generated and questions asked so far
``http_json``   JSON over HTTP; ``connections``: they are kept; ``servers``: how servers are asked again, and what becomes
                of a request without answer
``journal``     servers' answers on disk as they come; ``remembered``: what judges were asked before, in checkpoints

Untrusted code:
``sandbox``     code in killable processes
``tested``      a program and its test, in two of them
``syntax``      parsing Python beside other threads
"""
