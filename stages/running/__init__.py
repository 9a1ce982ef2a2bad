"""The process around a stage: ranks, forks, sandboxes, devices, randomness."""
