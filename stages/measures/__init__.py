"""statistics evaluation.text evaluation.preference evaluation.reward_model evaluation.overopt evaluation.sampling
evaluation.suites evaluation.frontier
"""
