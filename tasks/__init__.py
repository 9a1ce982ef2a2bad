"""Where orchestration meets the machine learning: the body shared by all stage tasks, and one Prefect task per
stage.
"""
