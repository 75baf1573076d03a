"""The whole idea in one page: a network in three blocks, each trained alone, then run as one diffusion model.

    python examples/01_blocks_in_one_page.py

Handwritten digits; 11 seconds on one CPU core. No command line, no checkpoints, no Fabric: just the parts.
"""

import torch

from diffusionblocks import seeds
from diffusionblocks.data import Batches, evaluation_batches, load_images
from diffusionblocks.families.vit import Images, ViT, ViTSettings
from diffusionblocks.metrics import accuracy, combine
from diffusionblocks.model import Denoiser
from diffusionblocks.noise import LogNormal
from diffusionblocks.objective import reduce
from diffusionblocks.partition import make_partition, plan_walk
from diffusionblocks.sample import walk

SEED, UPDATES, BATCH = 0, 120, 64

# Real data: 8 x 8 images of ten digits.
data = load_images("digits")
images = Images(data.image_size, data.channels, frequencies=(0.1,) * 10)

# 1. Noise levels have a law; 2. layers and law are cut into three parts, block 0 with the highest noise.
law = LogNormal(p_mean=0.5, p_std=1.2, sigma_min=0.002, sigma_max=80.0)
partition = make_partition(law, layers=6, blocks=3)
for block, layers in enumerate(partition.layers):
    low, high = partition.range(block)
    print(f"block {block}: layers {layers}, denoises from sigma {high:.3g} down to {low:.3g}")

# 3. Each block is a denoiser of the label's code, 4. trained with its own loss. No other block exists meanwhile.
family = ViT(ViTSettings(layers=6), images, partition, seed=SEED)
trained = {}
for block in range(partition.blocks):
    network = family.build_block(block)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    batches = Batches(data, BATCH, SEED, block)
    for update in range(UPDATES):
        batch = batches(update)
        draw = partition.draw(block, BATCH, seeds.generator(SEED, block, "sigma", update))
        losses = family.losses(network, batch, draw, seeds.generator(SEED, block, "noise", update))
        loss = reduce(losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained[block] = network
    print(f"block {block}: loss {loss.item():.3f} after {UPDATES} updates")

# 5. At inference the walk goes from sigma_max down; each call belongs to one block and ends nearer to its answer.
denoiser = Denoiser(family, trained.__getitem__)
plan = plan_walk(partition, steps=3)
test = list(evaluation_batches(data, "test", 360))
labels = torch.cat([batch.y for batch in test])
z = torch.zeros(len(labels), family.table.shape[1])
beliefs = []
for call, belief in walk(denoiser, plan, z, lambda: (batch.x for batch in test)):
    beliefs.append(belief)
    print(
        f"call {call.index}, block {call.block}, sigma {call.sigma:6.3f}: {100 * accuracy(belief, labels):.1f} % right"
    )
print(f"all calls averaged: {100 * accuracy(combine(torch.stack(beliefs)), labels):.1f} % of {len(labels)} test images")
