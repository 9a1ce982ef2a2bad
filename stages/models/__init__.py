"""Models as they are trained: loading, forward passes, adapters, frozen and sharded weights, memory. Sampling from them
is in ``stages.decoding``, heads of reward models in ``stages.reward_models``, losses in ``stages.losses``.

``modeling``      loading, the backbone, the LM head in chunks, publishing
``layers``        what a decoder layer of a known family computes: the one description of training and sampling
``lean``          the training forward of these families
``banded``        its attention within a window, and with capped scores
``varlen``        its attention on a GPU: one call for all conversations of a micro-batch
``fused``         Triton kernels between its matrix products
``products``      its float32 products on the CPU
``experts``       mixtures of experts; ``balance``: their load-balancing loss
``adapters``      LoRA; ``dropout``: on what an adapter reads
``frozen``        frozen weights in bfloat16 or 4 bits; ``quantised``: the 4 bits
``sharding``      weights split over ranks (FSDP2); ``pending``: read from files in parts only
``memory``        what a stage will need, before anything is loaded
``optimizers``    the optimizers there are
``averages``      averages of weights that move while training goes on
``divergence``    a student's distributions against a teacher's, over the whole vocabulary; ``span_losses``: against those
                  of a teacher with another vocabulary
``new_tokens``    tokens for a chat template's marks, and their rows
``epochs``        the model behind every pass over the rows
``tensor_files``  tensors in files, one at a time in memory
"""
