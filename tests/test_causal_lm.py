"""The autoregressive language model in blocks: nothing leaks, and it starts as the plain network."""

import math
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from diffusionblocks import objective
from diffusionblocks.block import LlamaLayer, set_checkpointing
from diffusionblocks.errors import InputError
from diffusionblocks.families.base import Block
from diffusionblocks.families.causal_lm import CausalLM, CausalLMSettings, CausalLMShell, PlainCausalLM, TokenBatch
from diffusionblocks.layers import rms_norm
from diffusionblocks.noise import LogNormal
from diffusionblocks.partition import Draw, make_partition
from test_layers import joined, numbers, randomised, through

SMALL = CausalLMSettings(
    layers=4, width=32, heads=4, kv_heads=2, mlp=48, vocabulary=11, tokens=6, condition_width=8, code_dim=5, chunk=0
)
LARGE = CausalLMSettings(layers=32, width=4096, heads=32, kv_heads=8, mlp=11008, vocabulary=32000, tokens=2048)


def causal_lm(settings: CausalLMSettings = SMALL, seed: int = 0, blocks: int = 2, **options: str) -> CausalLM:
    return CausalLM(settings, make_partition(LogNormal(), settings.layers, blocks), seed, **options)


def batch_of(n: int = 3, settings: CausalLMSettings = SMALL) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    return TokenBatch(torch.randint(settings.vocabulary, (n, settings.tokens + 1), generator=generator))


def draw_of(family: CausalLM, block: int = 0, n: int = 3, seed: int = 0) -> Draw:
    return family.partition.draw(block, n, torch.Generator().manual_seed(seed))


def noisy_codes(n: int = 3, seed: int = 0) -> Tensor:
    return numbers(n, SMALL.tokens, SMALL.code_dim, seed=seed)


# -- the layer ----------------------------------------------------------------------------------------------------


def llama_layer() -> LlamaLayer:
    """A layer whose modulation is at its start, and everything else is random."""
    layer = LlamaLayer(32, 4, 2, 48, condition_width=8)
    for part in (layer.norm1, layer.attention, layer.norm2, layer.mlp):
        randomised(part)
    return layer


def test_norm_divides_by_the_root_mean_square() -> None:
    norm = randomised(rms_norm(32))
    h = numbers(2, 3, 32)
    expected = h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(h), expected)


def test_layer_starts_as_the_plain_one_and_its_contexts_condition_is_fixed() -> None:
    layer, plain = llama_layer(), LlamaLayer(32, 4, 2, 48)
    assert plain.modulation is None
    plain.load_state_dict({key: value for key, value in layer.state_dict().items() if "modulation" not in key})
    h, one, other = numbers(3, 8, 32), numbers(3, 8), numbers(3, 8, seed=1)
    torch.testing.assert_close(joined(layer, h, 4, one), joined(plain, h, 4, None), rtol=0, atol=1e-5)
    assert layer.modulation is not None
    randomised(layer.modulation)
    assert torch.equal(joined(layer, h, 4, one)[:, :4], joined(layer, h, 4, other)[:, :4])
    assert not torch.isclose(joined(layer, h, 4, one)[:, 4:], joined(layer, h, 4, other)[:, 4:]).all(2).any()
    torch.testing.assert_close(
        joined(layer, h, 4, one)[:, :4], layer(h[:, :4], torch.zeros(3, 8))[0], rtol=0, atol=1e-5
    )


# -- what sees what -----------------------------------------------------------------------------------------------


def test_block_sees_no_later_token_and_no_other_slots_noisy_code() -> None:
    family = causal_lm()
    block = randomised(family.build_block(1))
    batch, z, draw = batch_of(), noisy_codes(), draw_of(family, block=1)
    before = block(z, batch.x, draw)
    assert before.shape == (3, SMALL.tokens, SMALL.vocabulary)
    for slot in range(SMALL.tokens):
        tokens, codes = batch.x.clone(), z.clone()
        tokens[:, slot] = (tokens[:, slot] + 1) % SMALL.vocabulary
        changed = block(z, tokens, draw)
        assert torch.equal(changed[:, :slot], before[:, :slot])
        assert not torch.isclose(changed[:, slot:], before[:, slot:]).all(2).any()
        codes[:, slot] += 1
        changed, others = block(codes, batch.x, draw), [other for other in range(SMALL.tokens) if other != slot]
        assert torch.equal(changed[:, others], before[:, others])
        assert not torch.isclose(changed[:, slot], before[:, slot]).all(1).any()


def test_plain_network_sees_no_later_token() -> None:
    plain, x = randomised(causal_lm().make_plain((0, 1))), batch_of().x
    before = plain(x)
    for slot in range(SMALL.tokens):
        tokens = x.clone()
        tokens[:, slot] = (tokens[:, slot] + 1) % SMALL.vocabulary
        changed = plain(tokens)
        assert torch.equal(changed[:, :slot], before[:, :slot])
        assert not torch.isclose(changed[:, slot:], before[:, slot:]).all(2).any()


def test_clean_stream_knows_neither_z_nor_sigma() -> None:
    family = causal_lm()
    block = randomised(family.build_block(1))
    assert isinstance(block, Block)
    x, z, sigma = batch_of().x, noisy_codes(), draw_of(family, block=1).sigma

    def features(z: Tensor, sigma: Tensor) -> Tensor:
        return through(block, z, x, sigma)

    before = features(z, sigma)
    for changed in (features(z + 1, sigma), features(z, 2 * sigma)):
        assert torch.equal(changed[:, : SMALL.tokens], before[:, : SMALL.tokens])
        assert not torch.isclose(changed[:, SMALL.tokens :], before[:, SMALL.tokens :]).all(2).any()


def test_batch_aligns_each_slot_with_the_next_token() -> None:
    batch = TokenBatch(torch.tensor([[5, 6, 7, 8]]))
    assert batch.x.tolist() == [[5, 6, 7]]
    assert batch.y.tolist() == [[6, 7, 8]]
    assert len(batch.y) == 1


# -- starts as the plain network ----------------------------------------------------------------------------------


def plain_with_the_weights_of(family: CausalLM, block: Block) -> PlainCausalLM:
    plain = family.make_plain(family.partition.layers[block.number])
    shell = block.shell
    assert isinstance(shell, CausalLMShell)
    plain.embedding.load_state_dict(shell.embedding.state_dict())
    plain.head.load_state_dict(shell.head.state_dict())
    plain.stack.load_state_dict({k: v for k, v in block.stack.state_dict().items() if "modulation" not in k})
    return plain


def test_block_starts_as_the_plain_network() -> None:
    family, batch = causal_lm(), batch_of()
    block = family.build_block(1)
    shell = block.shell
    assert isinstance(shell, CausalLMShell)
    randomised(shell.head)
    plain = plain_with_the_weights_of(family, block)
    expected = plain(batch.x).detach()
    assert float(expected.std()) > 0.1
    for seed in range(2):
        draw = draw_of(family, 1, seed=seed)
        logits = block(noisy_codes(seed=seed), batch.x, draw)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    losses = family.losses(block, batch, draw, torch.Generator().manual_seed(0))
    torch.testing.assert_close(losses, family.plain_losses(plain, batch), rtol=0, atol=1e-5)


def test_untrained_model_believes_all_tokens_alike() -> None:
    family, batch = causal_lm(), batch_of()
    losses = family.losses(family.build_block(0), batch, draw_of(family), torch.Generator().manual_seed(0))
    torch.testing.assert_close(losses, torch.full((3,), math.log(SMALL.vocabulary)))
    torch.testing.assert_close(family.plain_losses(family.make_plain((0,)), batch), losses)


# -- losses -------------------------------------------------------------------------------------------------------


def test_loss_is_the_mean_over_slots_of_the_next_tokens_cross_entropy() -> None:
    family, batch = causal_lm(weight="edm"), batch_of()
    block, draw = randomised(family.build_block(1)), draw_of(family, 1)
    codes = family.make_codes()
    eps = torch.randn(3, SMALL.tokens, SMALL.code_dim, generator=torch.Generator().manual_seed(7))
    z = codes[batch.tokens[:, 1:]] + draw.sigma[:, None, None] * eps
    log_probs = block(z, batch.tokens[:, :-1], draw).log_softmax(2)
    expected = -log_probs.gather(2, batch.tokens[:, 1:, None])[..., 0].mean(1)
    expected = expected * family.preconditioning.weight(draw.sigma)
    got = family.losses(block, batch, draw, torch.Generator().manual_seed(7))
    torch.testing.assert_close(got, expected)


def test_codes_are_common_frozen_and_as_large_as_asked() -> None:
    family = causal_lm(replace(SMALL, code_norm=3.0, code_dim=9))
    first, second = (family.build_block(number) for number in (0, 1))
    assert torch.equal(first.shell.codes(), second.shell.codes())
    torch.testing.assert_close(first.shell.codes().norm(dim=1), torch.full((11,), 3.0))
    rms = float(first.shell.codes().square().mean().sqrt())
    assert family.preconditioning.sigma_data == pytest.approx(rms) == pytest.approx(1.0)
    assert not any("table" in key for key in first.state_dict())
    assert not torch.equal(causal_lm(seed=1).make_codes(), causal_lm().make_codes())


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_chunks_and_checkpointing_change_neither_losses_nor_gradients(chunk: int) -> None:
    batch, found = batch_of(), []
    for family, checkpointing in ((causal_lm(), False), (causal_lm(replace(SMALL, chunk=chunk)), True)):
        block = randomised(family.build_block(1))
        set_checkpointing(block, checkpointing)
        losses = family.losses(block, batch, draw_of(family, 1), torch.Generator().manual_seed(0))
        losses.sum().backward()
        plain = family.plain_losses(plain_with_the_weights_of(family, block), batch)
        found.append([losses, plain, *(parameter.grad for parameter in block.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_every_parameter_takes_part() -> None:
    family = causal_lm()
    for module in (randomised(family.build_block(1)), randomised(family.build_joint())):
        family.losses(module, batch_of(), draw_of(family, 1), torch.Generator().manual_seed(0)).sum().backward()
        idle = [name for name, p in module.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
        assert all(name.startswith("blocks.0.stack") for name in idle)
        assert bool(idle) == (not isinstance(module, Block))


def test_bf16_stays_near_float32() -> None:
    family, batch = causal_lm(replace(SMALL, chunk=4)), batch_of()
    block, draw = randomised(family.build_block(1)), draw_of(family, 1)
    exact = family.losses(block, batch, draw, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = family.losses(block, batch, draw, torch.Generator().manual_seed(0))
    losses.sum().backward()
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, exact, rtol=0.05, atol=0)


@pytest.mark.parametrize("kind", ["block", "plain"])
def test_a_few_steps_lower_the_loss(kind: str) -> None:
    # The token after t is t + 1: to be read off the slot's own token, whatever z says.
    family = causal_lm(replace(SMALL, chunk=4))
    tokens = torch.arange(SMALL.vocabulary)[:, None] + torch.arange(SMALL.tokens + 1)
    batch = TokenBatch(tokens % SMALL.vocabulary)
    module: nn.Module = family.build_block(0) if kind == "block" else family.make_plain((0, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    values = []
    for step in range(30):
        losses = family.step_losses(module, batch, 0, step) if kind == "block" else family.plain_losses(module, batch)
        loss = objective.reduce(losses)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(float(loss.detach()))
    assert values[0] == pytest.approx(math.log(SMALL.vocabulary), abs=1e-5)
    assert values[-1] < 0.1 * values[0]


# -- blocks, planning, bad input ----------------------------------------------------------------------------------


def test_files_of_two_blocks_share_no_name() -> None:
    family = causal_lm()
    first, second = (family.build_block(number).state_dict() for number in (0, 1))
    assert not first.keys() & second.keys()
    assert {key.split(".")[2] for key in {**first, **second} if key.startswith("stack.")} == {"0", "1", "2", "3"}


def test_a_large_block_is_planned_without_memory_in_seconds() -> None:
    start = time.monotonic()
    with FakeTensorMode():
        family = causal_lm(LARGE, blocks=8)
        block = family.build_block(3)
        losses = family.losses(block, family.batch_like(2), Draw(3, torch.ones(2)), None)
        losses.sum().backward()
    assert losses.shape == (2,)
    assert all(isinstance(t, FakeTensor) for t in (*block.parameters(), *block.buffers(), losses))
    assert all(isinstance(parameter.grad, FakeTensor) for parameter in block.parameters())
    # Embedding and head; four layers of attention (keys and values a quarter) and SwiGLU, and a little more.
    expected = 2 * 32000 * 4096 + 4 * (2.5 * 4096**2 + 3 * 4096 * 11008)
    assert sum(p.numel() for p in block.parameters()) == pytest.approx(expected, rel=0.01)
    assert time.monotonic() - start < 20


def test_a_large_network_is_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        family = causal_lm(replace(LARGE, layers=80, width=8192, heads=64, mlp=28672, vocabulary=128256), blocks=8)
        block, plain = family.build_block(0), family.make_plain(tuple(range(80)))
        assert family.batch_like(2).tokens.shape == (2, 2049)
    assert all(t.is_meta for module in (block, plain) for t in (*module.parameters(), *module.buffers()))
    assert sum(p.numel() for p in plain.parameters()) == pytest.approx(70.6e9, rel=0.01)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"layers": 0}, "layers 0 is out of range: choose a number above 0"),
        ({"code_norm": 0.0}, "code_norm 0.0 is out of range: choose a number above 0"),
        ({"vocabulary": 1}, "vocabulary 1 is out of range: choose 2 or more"),
        ({"chunk": -1}, "chunk -1 is out of range: choose a number of tokens, or 0"),
        ({"width": 36}, "width 36 isn't an even multiple of heads 4: choose heads of an even width"),
        ({"kv_heads": 3}, "heads 4 isn't a multiple of kv_heads 3: choose kv_heads that divide it"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, float], part: str) -> None:
    with pytest.raises(InputError, match=part):
        replace(SMALL, **wrong)


def test_unknown_weight_is_refused() -> None:
    with pytest.raises(InputError, match="unknown weight 'snr': choose none, edm, edm_clamped"):
        causal_lm(weight="snr")
