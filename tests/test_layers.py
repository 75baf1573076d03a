"""Layers, conditioned layers and stacks, and the vision transformer's blocks that are made of them."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from diffusionblocks.block import ConditionedLayer, LayerStack, NoiseEmbedding, set_checkpointing
from diffusionblocks.data import Batch
from diffusionblocks.errors import InputError
from diffusionblocks.families.base import Block
from diffusionblocks.families.vit import CODES, CONTEXTS, READOUTS, Images, ViT, ViTSettings, make_codes
from diffusionblocks.layers import (
    Attention,
    CausalAttention,
    Patches,
    SwiGLU,
    random_codes,
    rms_norm,
    rotate,
    scaled_norm,
    simplex_codes,
    unit_norm,
)
from diffusionblocks.memory import MemoryMeter
from diffusionblocks.noise import LogNormal, Preconditioning
from diffusionblocks.objective import cross_entropy
from diffusionblocks.partition import Draw, make_partition

SMALL = ViTSettings(layers=4, width=16, heads=2, mlp=32, patch=4, condition_width=8)
IMAGES = Images(size=8, channels=3, frequencies=(0.2,) * 5)
PATCHES = 4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randomised(module: nn.Module) -> nn.Module:
    """Every parameter drawn anew, so that nothing is hidden behind a zero that training would fill."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(0.3 * numbers(*parameter.shape, seed=seed))
    return module


def vit(settings: ViTSettings = SMALL, seed: int = 0, **options: str) -> ViT:
    """Two blocks of two layers; learned codes come with the shell that they need."""
    if settings.codes == "learned":
        options.setdefault("shell", "joint")
    return ViT(settings, IMAGES, make_partition(LogNormal(), settings.layers, 2), seed, **options)


def inputs(family: ViT, block: int = 0, n: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Draw]:
    """z, x and a draw."""
    draw = family.partition.draw(block, n, torch.Generator().manual_seed(seed))
    return numbers(n, family.table.shape[1], seed=seed), numbers(n, 3, 8, 8, seed=seed + 100), draw


# -- unit vectors and codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_unit_norm_of_zero_and_tiny_vectors_is_finite(dtype: torch.dtype) -> None:
    smallest = torch.tensor(1, dtype=torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)
    assert smallest > 0
    assert torch.equal(unit_norm(torch.zeros(2, 8, dtype=dtype)), torch.zeros(2, 8, dtype=dtype))
    for size in (1e-7, smallest.item()):
        vectors = torch.full((2, 8), size, dtype=dtype)
        vectors[1, 1:] = 0
        scaled = unit_norm(vectors)
        assert scaled.dtype == dtype
        assert scaled.isfinite().all()
        torch.testing.assert_close(scaled.float().norm(dim=1), torch.ones(2), rtol=0, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_unit_norm_of_plain_and_huge_vectors_is_one(dtype: torch.dtype) -> None:
    # 5e4 squared overflows fp16; 3e38 squared overflows float32.
    for size in (1.0, 100.0, 1e4 if dtype == torch.float16 else 1e38):
        vectors = size * torch.linspace(-3, 3, 64).reshape(2, 2, 16).to(dtype)
        scaled = unit_norm(vectors).float()
        torch.testing.assert_close(scaled.norm(dim=-1), torch.ones(2, 2), rtol=0, atol=4e-3)
        directions = torch.cosine_similarity(scaled, vectors.float() / size, dim=-1)
        torch.testing.assert_close(directions, torch.ones(2, 2), rtol=0, atol=1e-4)


def test_unit_norm_has_finite_gradients_at_zero() -> None:
    vectors = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    unit_norm(vectors).sum().backward()
    assert vectors.grad is not None
    assert vectors.grad.isfinite().all()


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_simplex_codes_are_unit_vectors_at_equal_distances(classes: int) -> None:
    codes = simplex_codes(classes)
    assert codes.shape == (classes, classes - 1)
    gram = codes.double() @ codes.double().T
    # Unit norm on the diagonal; elsewhere -1/(C - 1), which makes all distances equal and the sum zero.
    expected = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1)
    torch.testing.assert_close(gram, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(codes.sum(0), torch.zeros(classes - 1), rtol=0, atol=1e-5)
    distances = torch.pdist(codes.double())
    assert float(distances.max() - distances.min()) < 1e-6
    assert torch.equal(codes, simplex_codes(classes))


def test_random_codes_are_seeded_unit_vectors() -> None:
    first, again, other = (random_codes(20, 7, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.testing.assert_close(first.norm(dim=1), torch.ones(20))


# -- attention and patches ----------------------------------------------------------------------------------------


def joined(part: nn.Module, h: Tensor, context: int, *condition: Tensor | None) -> Tensor:
    """What a layer or an attention makes of h, whose first `context` tokens are an isolated context."""
    if context == 0:
        return part(h, *condition)[0]
    found, still = part(h[:, context:], *condition, h[:, :context])
    return torch.cat([still, found], dim=1)


def through(block: nn.Module, z: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
    """The context and the tokens after a block's layers, all of them computed to the end."""
    assert isinstance(block, Block)
    h, condition, context = block.shell.enter(z, x, sigma)
    for layer in block.stack.layers.values():
        h, context = layer(h, condition, context)
    return h if context is None else torch.cat([context, h], dim=1)


def masked_attention(attention: Attention, h: Tensor, context: int) -> Tensor:
    """The same map with an explicit mask, head by head."""
    n, tokens, width = h.shape
    dim = width // attention.heads
    q, k, v = (part.reshape(n, tokens, attention.heads, dim) for part in attention.qkv(h).split(width, dim=2))
    hidden = torch.zeros(tokens, tokens, dtype=torch.bool)
    hidden[:context, context:] = context > 0
    heads = []
    for head in range(attention.heads):
        scores = q[:, :, head] @ k[:, :, head].transpose(1, 2) / math.sqrt(dim)
        heads.append(scores.masked_fill(hidden, -math.inf).softmax(2) @ v[:, :, head])
    return attention.out(torch.cat(heads, dim=2))


@pytest.mark.parametrize("context", [0, 1, 4, 6])
def test_attention_agrees_with_an_explicit_mask(context: int) -> None:
    attention, h = randomised(Attention(16, 4)), numbers(3, 7, 16)
    assert isinstance(attention, Attention)
    expected = masked_attention(attention, h, context)
    torch.testing.assert_close(joined(attention, h, context), expected, rtol=0, atol=1e-6)


def test_context_sees_only_itself() -> None:
    attention, h = randomised(Attention(16, 4)), numbers(3, 7, 16)
    later, earlier = h.clone(), h.clone()
    later[:, 5:] += 1
    earlier[:, 0] += 1
    before = joined(attention, h, 5)
    assert torch.equal(joined(attention, later, 5)[:, :5], before[:, :5])
    assert not torch.isclose(joined(attention, later, 5)[:, 5:], before[:, 5:]).all(2).any()
    # The later tokens see the context, and the context's tokens each other.
    assert not torch.isclose(joined(attention, earlier, 5), before).all(2).any()


def test_without_context_all_tokens_see_all() -> None:
    attention, h = randomised(Attention(16, 4)), numbers(3, 7, 16)
    for token in range(7):
        changed = h.clone()
        changed[:, token] += 1
        assert not torch.isclose(attention(changed)[0], attention(h)[0]).all(2).any()


def masked_causal_attention(attention: CausalAttention, h: Tensor, visible: Tensor) -> Tensor:
    """The same map with an explicit mask [tokens, tokens] and repeated keys and values; slots repeat in the streams."""
    n, tokens, width = h.shape
    dim = attention.dim
    slots = torch.arange(tokens) % int(visible[-1].sum())
    q, k, v = (part(h).view(n, tokens, -1, dim).transpose(1, 2) for part in (attention.q, attention.k, attention.v))
    k, v = (part.repeat_interleave(width // dim // attention.kv_heads, dim=1) for part in (k, v))
    scores = rotate(q, slots) @ rotate(k, slots).transpose(2, 3) / math.sqrt(dim)
    mixed = scores.masked_fill(~visible, -math.inf).softmax(3) @ v
    return attention.out(mixed.transpose(1, 2).reshape(n, tokens, width))


def two_streams(slots: int) -> Tensor:
    """What each of T clean and then T noisy tokens sees."""
    causal = torch.ones(slots, slots, dtype=torch.bool).tril()
    earlier, itself, nothing = causal.tril(-1), torch.eye(slots, dtype=torch.bool), torch.zeros_like(causal)
    return torch.cat([torch.cat([causal, nothing], 1), torch.cat([earlier, itself], 1)])


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("context", [0, 1, 6])
def test_causal_attention_agrees_with_an_explicit_mask(context: int, kv_heads: int) -> None:
    attention = randomised(CausalAttention(32, 4, kv_heads))
    assert isinstance(attention, CausalAttention)
    visible = two_streams(context) if context else two_streams(6)[:6, :6]
    h = numbers(3, len(visible), 32).requires_grad_()
    out, expected = joined(attention, h, context), masked_causal_attention(attention, h, visible)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    loss, parameters = numbers(*out.shape, seed=1), [h, *attention.parameters()]
    got, wanted = (torch.autograd.grad((loss * end).sum(), parameters) for end in (out, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_noisy_streams_own_score_may_be_extreme() -> None:
    attention = randomised(CausalAttention(32, 4, 2))
    assert isinstance(attention, CausalAttention)
    for scale in (1e-2, 30.0):
        h = scale * numbers(2, 12, 32)
        expected = masked_causal_attention(attention, h, two_streams(6))
        torch.testing.assert_close(joined(attention, h, 6), expected, rtol=1e-4, atol=1e-4 * scale)


def test_shared_keys_and_values_are_repeated_ones() -> None:
    shared, repeated = randomised(CausalAttention(32, 4, 2)), CausalAttention(32, 4, 4)
    state = shared.state_dict()
    for name in ("k.weight", "v.weight"):
        state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    repeated.load_state_dict(state)
    h = numbers(3, 8, 32)
    for context in (0, 4):
        torch.testing.assert_close(joined(shared, h, context), joined(repeated, h, context), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("little_to_sweep")
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_causal_attention_makes_nothing_of_tokens_by_tokens(kv_heads: int) -> None:
    attention, peaks = CausalAttention(16, 2, kv_heads), []
    for context in (256, 512):
        with MemoryMeter() as meter:
            joined(attention, numbers(1, 2 * context, 16), context).sum().backward()
        peaks.append(meter.peak["activations"])
    # The weights' gradients are there in the second round alone.
    assert peaks[1] < 2.1 * peaks[0]


def test_two_streams_have_the_same_length() -> None:
    with pytest.raises(ValueError, match="3 clean tokens can't be the context of 4 noisy ones"):
        CausalAttention(32, 4, 4)(numbers(1, 4, 32), numbers(1, 3, 32))


def test_rotary_products_depend_on_the_distance_alone() -> None:
    q, k = numbers(1, 16), numbers(1, 16, seed=1)

    def product(at: int, other: int) -> float:
        return float((rotate(q, torch.tensor([at])) * rotate(k, torch.tensor([other]))).sum())

    for distance in (0, 1, 7):
        assert product(distance, 0) == pytest.approx(product(40 + distance, 40), abs=1e-4)
    assert product(3, 3) == pytest.approx(float((q * k).sum()), abs=1e-4)
    assert len({round(product(distance, 0), 2) for distance in range(5)}) == 5
    # The first pair turns by one radian a slot.
    turned = rotate(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([2]))
    torch.testing.assert_close(turned, torch.tensor([[math.cos(2), 0.0, math.sin(2), 0.0]]))


def test_swiglu_by_hand() -> None:
    mlp = randomised(SwiGLU(4, 6))
    assert isinstance(mlp, SwiGLU)
    h = numbers(2, 3, 4)
    gate = h @ mlp.gate.weight.T
    expected = (gate * gate.sigmoid() * (h @ mlp.up.weight.T)) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(h), expected, rtol=0, atol=1e-6)


def test_patches_are_cut_out_row_by_row() -> None:
    patches = Patches(8, 3, 4, 48)
    with torch.no_grad():
        patches.positions.zero_()
        patches.project.weight.copy_(torch.eye(48))
        patches.project.bias.zero_()
    x = numbers(2, 3, 8, 8)
    corners = [x[:, :, row : row + 4, column : column + 4] for row in (0, 4) for column in (0, 4)]
    torch.testing.assert_close(patches(x), torch.stack([c.flatten(1) for c in corners], dim=1))


# -- conditioned layers and stacks --------------------------------------------------------------------------------


def conditioned(gates: float) -> ConditionedLayer:
    """A layer whose modulation is at its start, and everything else is random."""
    layer = ConditionedLayer(16, 2, 32, condition_width=8, gates=gates)
    for part in (layer.norm1, layer.attention, layer.norm2, layer.mlp):
        randomised(part)
    return layer


@pytest.mark.parametrize("context", [0, 4])
def test_layer_starts_as_the_plain_one(context: int) -> None:
    layer, plain = conditioned(gates=1.0), ConditionedLayer(16, 2, 32)
    assert plain.modulation is None
    plain.load_state_dict({key: value for key, value in layer.state_dict().items() if "modulation" not in key})
    h = numbers(3, 6, 16)
    for seed in range(3):
        found, expected = joined(layer, h, context, 100 * numbers(3, 8, seed=seed)), joined(plain, h, context, None)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert not torch.isclose(expected, h).all(2).any()


@pytest.mark.parametrize("context", [0, 4])
def test_layer_with_closed_gates_starts_as_the_identity(context: int) -> None:
    h = numbers(3, 6, 16)
    assert torch.equal(joined(conditioned(gates=0.0), h, context, numbers(3, 8)), h)


@pytest.mark.parametrize("gates", [0.0, 1.0])
def test_contexts_condition_is_fixed(gates: float) -> None:
    layer = conditioned(gates)
    assert layer.modulation is not None
    randomised(layer.modulation)
    h, one, other = numbers(3, 6, 16), numbers(3, 8), numbers(3, 8, seed=1)
    assert torch.equal(joined(layer, h, 4, one)[:, :4], joined(layer, h, 4, other)[:, :4])
    assert not torch.isclose(joined(layer, h, 4, one)[:, 4:], joined(layer, h, 4, other)[:, 4:]).all(2).any()
    assert not torch.isclose(layer(h, one)[0], layer(h, other)[0]).all(2).any()
    # "Fixed" is the condition 0: the context gets what noisy tokens with the condition 0 would get.
    torch.testing.assert_close(
        joined(layer, h, 4, one)[:, :4], layer(h[:, :4], torch.zeros(3, 8))[0], rtol=0, atol=1e-5
    )


def test_each_example_has_its_own_condition() -> None:
    layer = randomised(conditioned(gates=1.0))
    h, condition = numbers(1, 6, 16).expand(2, -1, -1), numbers(2, 8)
    together = joined(layer, h, 4, condition)
    for example in range(2):
        alone = joined(layer, h[:1], 4, condition[example : example + 1])
        torch.testing.assert_close(together[example : example + 1], alone, rtol=0, atol=1e-5)


def test_noise_embedding_tells_close_levels_apart() -> None:
    embedding = NoiseEmbedding(8)
    sigma = torch.tensor(make_partition(LogNormal(), 12, 12).edges)
    features = embedding(Preconditioning().c_noise(sigma))
    assert features.shape == (13, 8)
    # A sinusoid table made for t in 0..1000 moves by less than 1e-2 between such levels.
    assert float(torch.pdist(features.detach()).min()) > 0.05


def gradients(checkpointing: bool) -> tuple[Tensor, list[Tensor]]:
    stack = LayerStack({number: ConditionedLayer(16, 2, 32, condition_width=8) for number in (4, 5, 6)})
    randomised(stack)
    set_checkpointing(nn.Sequential(stack), checkpointing)
    assert stack.checkpointing == checkpointing
    h = numbers(3, 6, 16).requires_grad_()
    out = stack(h[:, 4:], numbers(3, 8).requires_grad_(), h[:, :4])
    out.square().sum().backward()
    assert h.grad is not None
    return out, [h.grad, *(p.grad for p in stack.parameters() if p.grad is not None)]


def test_what_is_not_read_is_not_computed_and_changes_nothing() -> None:
    layer = randomised(conditioned(gates=1.0))
    h, context, condition = numbers(3, 2, 16), numbers(3, 4, 16, seed=1), numbers(3, 8)
    parameters = list(layer.parameters())
    whole, _ = layer(h, condition, context)
    read, nothing = layer(h, condition, context, last=True)
    assert nothing is None
    assert torch.equal(read, whole)
    expected, found = (torch.autograd.grad(out.square().sum(), parameters) for out in (whole, read))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_stack_returns_its_tokens_and_a_plain_one_those_that_are_wanted() -> None:
    family = vit()
    block = randomised(family.build_block(1))
    z, x, draw = inputs(family, block=1)
    found = block.stack(*block.shell.enter(z, x, draw.sigma))
    torch.testing.assert_close(found, through(block, z, x, draw.sigma)[:, PATCHES:])
    stack, h = LayerStack({number: ConditionedLayer(16, 2, 32) for number in range(3)}), numbers(3, 6, 16)
    torch.testing.assert_close(stack(h, wanted=2), stack(h)[:, 4:])
    with pytest.raises(ValueError, match="only a plain network's tokens"):
        stack(h, numbers(3, 8), wanted=2)


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), rms_norm(16)])
def test_folded_norm_is_the_norm_scaled_and_shifted(norm: nn.Module) -> None:
    randomised(norm)
    h, scale, shift = numbers(3, 6, 16), numbers(16).requires_grad_(), numbers(16, seed=1).requires_grad_()
    outs = scaled_norm(norm, h, scale, shift), norm(h) * (1 + scale) + shift
    torch.testing.assert_close(*outs, rtol=0, atol=1e-6)
    parameters = [scale, shift, *norm.parameters()]
    found, expected = (torch.autograd.grad(out.square().sum(), parameters) for out in outs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_checkpointing_changes_no_bit() -> None:
    (plain, expected), (out, got) = gradients(False), gradients(True)
    assert torch.equal(out, plain)
    assert len(got) == len(expected) > 30
    assert all(map(torch.equal, got, expected))


def test_checkpointing_keeps_only_the_layers_inputs() -> None:
    stack = LayerStack({number: ConditionedLayer(16, 2, 32, condition_width=8) for number in range(4)})
    saved = []
    for on in (False, True):
        set_checkpointing(stack, on)
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            stack(numbers(3, 2, 16).requires_grad_(), numbers(3, 8), numbers(3, 4, 16).requires_grad_())
        saved.append(sum(kept))
    assert saved[1] < saved[0] / 10


def test_stacks_keys_carry_global_layer_numbers() -> None:
    stack = LayerStack({number: ConditionedLayer(16, 2, 32) for number in (4, 5)})
    assert {key.split(".")[1] for key in stack.state_dict()} == {"4", "5"}
    family = vit()
    first, second = (family.build_block(number).state_dict() for number in (0, 1))
    assert not first.keys() & second.keys()
    layers = {key.split(".")[2] for key in {**first, **second} if key.startswith("stack.")}
    assert layers == {"0", "1", "2", "3"}


# -- the vision transformer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("readout", "context", "codes"), list(itertools.product(READOUTS, CONTEXTS, CODES)))
def test_untrained_classifier_believes_all_classes_alike(readout: str, context: str, codes: str) -> None:
    family = vit(replace(SMALL, readout=readout, context=context, codes=codes))
    module = family.build_joint() if codes == "learned" else family.build_block(1)
    _, x, draw = inputs(family, block=1, n=6)
    batch = Batch(x, torch.arange(6) % 5)
    losses = family.losses(module, batch, draw, torch.Generator().manual_seed(0))
    torch.testing.assert_close(losses, torch.full((6,), math.log(5)), rtol=0, atol=1e-6)
    plain = family.plain_losses(family.make_plain((0, 1)), batch)
    torch.testing.assert_close(plain, torch.full((6,), math.log(5)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("readout", "context", "codes"), list(itertools.product(READOUTS, CONTEXTS, CODES)))
def test_every_parameter_takes_part(readout: str, context: str, codes: str) -> None:
    family = vit(replace(SMALL, readout=readout, context=context, codes=codes))
    module = randomised(family.build_joint().blocks[1] if codes == "learned" else family.build_block(1))
    assert isinstance(module, Block)
    _, x, draw = inputs(family, block=1, n=6)
    family.losses(module, Batch(x, torch.arange(6) % 5), draw, torch.Generator().manual_seed(0)).sum().backward()
    idle = [name for name, p in module.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert idle == []


def test_loss_is_weighted_as_asked() -> None:
    family, edm = vit(), vit(weight="edm")
    _, x, draw = inputs(family, block=1)
    batch, block = Batch(x, torch.tensor([0, 1, 2])), randomised(family.build_block(1))
    plain, weighted = (f.losses(block, batch, draw, torch.Generator().manual_seed(0)) for f in (family, edm))
    torch.testing.assert_close(weighted, plain * edm.preconditioning.weight(draw.sigma))
    assert edm.preconditioning.sigma_data == pytest.approx(0.5)  # unit codes in 4 dimensions


def test_block_with_a_target_gives_the_losses() -> None:
    family, y = vit(), torch.tensor([0, 1, 2])
    z, x, draw = inputs(family, block=1)
    block = randomised(family.build_block(1))
    assert torch.equal(block(z, x, draw, y), cross_entropy(block(z, x, draw), y))


def test_block_refuses_levels_of_another_block() -> None:
    family = vit()
    z, x, draw = inputs(family, block=1)
    family.build_block(1)(z, x, draw)
    with pytest.raises(ValueError, match="block 1 were given to block 0"):
        family.build_block(0)(z, x, draw)


def test_a_blocks_weights_depend_on_seed_and_number_alone() -> None:
    torch.manual_seed(0)
    alone = vit().build_block(1).state_dict()
    torch.manual_seed(1)
    family = vit()
    family.build_joint()
    first = family.build_block(0).state_dict()
    after = family.build_block(1).state_dict()
    assert alone.keys() == after.keys()
    assert all(torch.equal(alone[key], after[key]) for key in alone)
    other = vit(seed=1).build_block(1).state_dict()
    weight = "stack.layers.2.attention.qkv.weight"
    assert not torch.equal(alone[weight], other[weight])
    assert not torch.equal(alone[weight], first[weight.replace("2", "0")])


def test_building_leaves_the_global_generator_alone() -> None:
    state = torch.random.get_rng_state()
    family = vit()
    family.build_block(1)
    family.build_joint()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_joint_blocks_have_one_shell_and_separate_ones_their_own() -> None:
    family = vit()
    joint = family.build_joint()
    first, second = joint.blocks
    assert isinstance(first, Block)
    assert isinstance(second, Block)
    assert first.shell is second.shell is joint.shell
    z, x, draw = inputs(family, block=1)
    randomised(joint)
    assert torch.equal(joint(z, x, draw), second(z, x, draw))
    assert family.build_block(0).shell is not family.build_block(1).shell


@pytest.mark.parametrize("readout", READOUTS)
def test_isolated_patches_know_neither_z_nor_sigma(readout: str) -> None:
    family = vit(replace(SMALL, readout=readout))
    block = randomised(family.build_block(1))
    z, x, draw = inputs(family, block=1)
    before = through(block, z, x, draw.sigma)
    for changed in (through(block, z + 1, x, draw.sigma), through(block, z, x, 2 * draw.sigma)):
        assert torch.equal(changed[:, :PATCHES], before[:, :PATCHES])
        assert not torch.isclose(changed[:, PATCHES:], before[:, PATCHES:]).all(2).any()
    assert not torch.isclose(through(block, z, x + 1, draw.sigma), before).all(2).any()


def test_joint_patches_know_z() -> None:
    family = vit(replace(SMALL, context="joint"))
    block = randomised(family.build_block(1))
    z, x, draw = inputs(family, block=1)
    before, changed = (through(block, state, x, draw.sigma) for state in (z, z + 1))
    assert not torch.isclose(changed, before).all(2).any()


def test_frozen_codes_are_common_and_learned_ones_stay_normalised() -> None:
    family = vit()
    first, second = (family.build_block(number) for number in (0, 1))
    assert torch.equal(first.shell.codes(), second.shell.codes())
    assert not any("table" in key for key in first.state_dict())
    learned = vit(replace(SMALL, codes="learned", code_norm=2.0)).build_joint()
    assert "blocks.0.shells.joint.table" in learned.state_dict()
    randomised(learned)
    torch.testing.assert_close(learned.shell.codes().norm(dim=1), torch.full((5,), 2.0))


@pytest.mark.parametrize(("codes", "code_dim", "dim"), [("simplex", None, 4), ("random", None, 16), ("random", 7, 7)])
def test_codes_have_the_chosen_norm_and_dimensions(codes: str, code_dim: int | None, dim: int) -> None:
    settings = replace(SMALL, codes=codes, code_dim=code_dim, code_norm=3.0)
    table = make_codes(settings, 5, seed=0)
    assert table.shape == (5, dim)
    torch.testing.assert_close(table.norm(dim=1), torch.full((5,), 3.0))
    assert vit(settings).preconditioning.sigma_data == pytest.approx(float(table.square().mean().sqrt()), rel=1e-6)


@pytest.mark.parametrize(
    "setting",
    [
        {"context": "none"},
        {"readout": "mean"},
        {"codes": "onehot"},
        {"layers": 0},
        {"width": 0},
        {"heads": 0},
        {"heads": 3},
        {"mlp": -1},
        {"patch": 0},
        {"condition_width": 0},
        {"code_norm": 0.0},
        {"code_dim": 8},
    ],
)
def test_settings_that_make_no_network_are_refused(setting: dict[str, int | float | str]) -> None:
    with pytest.raises(InputError, match=next(iter(setting))):
        replace(SMALL, **setting)


@pytest.mark.parametrize("option", [{"shell": "shared"}, {"weight": "snr"}])
def test_unknown_options_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(InputError, match=f"unknown {next(iter(option))}"):
        vit(**option)


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(InputError, match="patch"):
        vit(replace(SMALL, patch=3))
    with pytest.raises(InputError, match="joint"):
        vit(replace(SMALL, codes="learned"), shell="per_block")
    with pytest.raises(InputError, match="2 or more"):
        ViT(SMALL, Images(8, 3, (1.0,)), make_partition(LogNormal(), 4, 2), seed=0)
