"""Reinforcement learning beside rollouts: advantages, the policy loss, critics, alarms."""
