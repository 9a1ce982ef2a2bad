"""Sampling: prompts and seeds in, completions with their log-probabilities out, and log-probabilities of given answers.
Scoring what was sampled is done elsewhere (``stages.generation``, ``stages.reward``).

Which engine samples:
``engines``         the contract of sampling engines, and the choice between the three below
``sampler``         the built-in one: continuous batching over slots of static KV
``vllm_engine``     vLLM in this process
``server_engine``   a server with the OpenAI completions interface
``writers``         models that are asked in words for a text, under an engine or behind a chat server

Under the built-in sampler:
``sampling``        from logits to a token: temperature, filters, penalties, the random number of a seed
``decoders``        which decoder computes a model, and what all of them ask of it
``lean_decoder``    a forward of our own for the families of ``stages.models.layers``
``lean_weights``    the fused weights that it computes from
``model_decoders``  the Hugging Face model's own forward, with keys and values or without
``kv_cache``        keys and values of prefilled rows, slots and shared beginnings
``prefixes``        beginnings that prompts share or continue, which need not be computed again
``kernels``         Triton kernels of a step
``replay``          a step captured as a CUDA graph

``likelihood``      log-probabilities of given responses: KL to a reference, implicit scores
"""
