"""Train deep networks one block at a time, each block alone, in the memory of one block (DiffusionBlocks, ICLR 2026).

Read in this order:
    noise.py      noise laws, preconditioning        model.py      blocks as one denoiser
    partition.py  layers and levels cut in blocks    sample.py     walks from noise to the answer
    block.py      layers that know the noise level   evaluate.py   what the walk gets right, and why
    objective.py  losses and their one reduction     run.py        from a recipe to jobs
    train.py      the only training loop             plan.py       its memory before it runs
                                                     cli.py        the command line
"""
