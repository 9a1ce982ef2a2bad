"""Measures as plain functions on numbers and strings (catalogue section D).

``statistics``    intervals, paired tests, calibration
``sampling``      pass@k, avg@k, maj@k
``preference``    pairwise verdicts: judge bias, length-controlled win rate, Elo, Bradley-Terry rankings
``reward_model``  probes and transforms for scorers
``text``          what answers look like: diversity, stock phrases, contrastiveness
``suites``        rules of multiple choice, alignment tax, refusals, token shift and other small suite rules
``overopt``       proxy against gold: curves, fits, divergence
``frontier``      reward against KL: which models no other beats
"""
