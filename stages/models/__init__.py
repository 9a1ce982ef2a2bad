"""Models as they are trained: loading, forward passes, adapters, frozen and sharded weights, memory."""
