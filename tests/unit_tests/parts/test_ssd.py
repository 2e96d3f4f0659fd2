# SPDX-License-Identifier: Apache-2.0
"""The stand-in for Mamba's kernels against the recurrence it stands for, in float64."""

import itertools
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from runtime import cpu_mode
from tests.functional_tests.parts import ssd
from tests.unit_tests.runtime.subprocesses import passes

BATCH, LENGTH, HEADS, WIDTH, STATE = 2, 11, 4, 3, 5
MIXER = "megatron.core.ssm.mamba_mixer"


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.log(1 + torch.exp(x))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def recurrence(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
) -> torch.Tensor:
    """Return ``h_t C_t`` for ``h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T``, head by head."""
    heads_per_group = HEADS // B.size(2)
    rows = []
    for sample, head in itertools.product(range(x.size(0)), range(HEADS)):
        group = head // heads_per_group
        state = torch.zeros(x.size(-1), B.size(-1), dtype=torch.float64)
        for t in range(x.size(1)):
            step = dt[sample, t, head]
            added = torch.outer(x[sample, t, head], B[sample, t, group])
            state = torch.exp(step * A[head]) * state + step * added
            rows.append(state @ C[sample, t, group])
    y = torch.stack(rows).unflatten(0, (x.size(0), HEADS, x.size(1)))
    return y.transpose(1, 2)


def assert_same(
    found: torch.Tensor, expected: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> None:
    """Compare values, and the gradients of a random projection in every input."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(found.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((found * weight).sum(), list(inputs.values()))
    wanted = torch.autograd.grad((expected * weight).sum(), list(inputs.values()))
    for name, gradient, want in zip(inputs, gradients, wanted, strict=True):
        assert want.abs().max() > 0, name
        torch.testing.assert_close(gradient, want, rtol=1e-10, atol=1e-12, msg=name)


def scan_inputs(groups: int) -> dict[str, torch.Tensor]:
    return {
        "x": random(BATCH, LENGTH, HEADS, WIDTH, seed=1),
        "dt": random(BATCH, LENGTH, HEADS, seed=2),
        "A": (-random(HEADS, seed=3).exp()).detach().requires_grad_(),
        "B": random(BATCH, LENGTH, groups, STATE, seed=4),
        "C": random(BATCH, LENGTH, groups, STATE, seed=5),
    }


@pytest.mark.parametrize("chunk_size", [1, 4, LENGTH, 16])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
def test_scan_equals_the_recurrence(chunk_size: int, groups: int) -> None:
    inputs = scan_inputs(groups)
    x, dt, A, B, C = inputs.values()
    # A negative step would let the state grow; the mixer's are positive.
    found = ssd.mamba_chunk_scan_combined(x, dt.abs(), A, B, C, chunk_size)
    assert_same(found, recurrence(x, dt.abs(), A, B, C), inputs)


@pytest.mark.parametrize("skip", [None, (HEADS,), (HEADS, WIDTH)], ids=["no D", "D", "D per p"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("positive", [False, True])
def test_options_of_the_scan(
    skip: tuple[int, ...] | None, gated: bool, biased: bool, positive: bool
) -> None:
    inputs = scan_inputs(2)
    x, dt, A, B, C = inputs.values()
    options: dict[str, torch.Tensor] = {}
    step = dt
    if biased:
        options["dt_bias"] = random(HEADS, seed=6)
        step = step + options["dt_bias"]
    if positive:
        step = softplus(step)
    expected = recurrence(x, step, A, B, C)
    if skip is not None:
        options["D"] = random(*skip, seed=7)
        per_channel = options["D"].reshape(HEADS, -1).expand(HEADS, WIDTH)
        expected = expected + x * per_channel
    if gated:
        options["z"] = random(BATCH, LENGTH, HEADS, WIDTH, seed=8)
        expected = expected * silu(options["z"])
    found = ssd.mamba_chunk_scan_combined(x, dt, A, B, C, 4, dt_softplus=positive, **options)
    assert_same(found, expected, {**inputs, **options})


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("per_channel", [False, True])
def test_split_convolves_causally_scans_and_gates(groups: int, per_channel: bool) -> None:
    inner, shared, taps = HEADS * WIDTH, groups * STATE, 4
    channels = inner + 2 * shared
    inputs = {
        "zxbcdt": random(BATCH, LENGTH, inner + channels + HEADS, seed=1),
        "weight": random(channels, taps, seed=2),
        "bias": random(channels, seed=3),
        "dt_bias": random(HEADS, seed=4),
        "A": (-random(HEADS, seed=5).exp()).detach().requires_grad_(),
        "D": random(HEADS, WIDTH, seed=6) if per_channel else random(HEADS, seed=6),
    }
    zxbcdt, weight, bias, dt_bias, A, D = inputs.values()
    found = ssd.mamba_split_conv1d_scan_combined(
        *inputs.values(),
        4,
        headdim=None if per_channel else WIDTH,
        ngroups=groups,
        norm_before_gate=False,
    )

    convolved = []
    for t in range(LENGTH):
        total = bias.expand(BATCH, channels)
        for tap in range(taps):
            # The last tap meets the token itself.
            source = t - (taps - 1) + tap
            if source >= 0:
                total = total + weight[:, tap] * zxbcdt[:, source, inner : inner + channels]
        convolved.append(silu(total))
    xbc = torch.stack(convolved, dim=1)
    x = xbc[..., :inner].reshape(BATCH, LENGTH, HEADS, WIDTH)
    b = xbc[..., inner : inner + shared].reshape(BATCH, LENGTH, groups, STATE)
    c = xbc[..., inner + shared :].reshape(BATCH, LENGTH, groups, STATE)
    step = softplus(zxbcdt[..., inner + channels :] + dt_bias)
    y = recurrence(x, step, A, b, c) + x * D.reshape(HEADS, -1)
    expected = y.reshape(BATCH, LENGTH, inner) * silu(zxbcdt[..., :inner])
    assert_same(found, expected, inputs)


@pytest.mark.parametrize("gate", [None, "before", "after"])
def test_norm_is_of_each_group(gate: str | None) -> None:
    groups, size = 3, 4
    inputs = {"x": random(BATCH, groups * size, seed=1)}
    if gate is not None:
        inputs["z"] = random(BATCH, groups * size, seed=2)
    norm = ssd.RMSNorm(
        groups * size, group_size=size, norm_before_gate=gate == "after", dtype=torch.float64
    )
    norm.weight.data = random(groups * size, seed=3).detach()
    expected = inputs["x"] * silu(inputs["z"]) if gate == "before" else inputs["x"]
    squares = expected.reshape(BATCH, groups, size).square().mean(-1, keepdim=True)
    scale = (squares + 1e-5).rsqrt().expand(-1, -1, size).reshape(BATCH, -1)
    expected = expected * scale * norm.weight
    if gate == "after":
        expected = expected * silu(inputs["z"])
    assert_same(norm(*inputs.values()), expected, {**inputs, "weight": norm.weight})


def test_half_precision_is_computed_in_float32() -> None:
    x, dt, A, B, C = (tensor.detach() for tensor in scan_inputs(2).values())
    low = [tensor.bfloat16() for tensor in (x, dt.abs(), B, C)]
    exact = recurrence(*(low[i].double() for i in (0, 1)), A, *(low[i].double() for i in (2, 3)))
    y = ssd.mamba_chunk_scan_combined(low[0], low[1], A.float(), low[2], low[3], 4)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)


def test_states_are_kept_in_the_dtype_asked_for() -> None:
    x, dt, A, B, C = (tensor.detach() for tensor in scan_inputs(1).values())
    arguments = (x, dt.abs(), A, B, C, 4)
    exact = ssd.mamba_chunk_scan_combined(*arguments)
    rounded = ssd.mamba_chunk_scan_combined(*arguments, state_dtype=torch.bfloat16)
    # The first chunk starts from no state.
    assert torch.equal(rounded[:, :4], exact[:, :4])
    assert not torch.equal(rounded[:, 4:], exact[:, 4:])
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.2)


def test_what_is_not_supported_is_refused() -> None:
    inputs = [tensor.detach() for tensor in scan_inputs(1).values()]
    with pytest.raises(ValueError, match="does not support return_final_states=True"):
        ssd.mamba_chunk_scan_combined(*inputs, 4, return_final_states=True)
    with pytest.raises(ValueError, match="does not support activation='relu'"):
        ssd.mamba_split_conv1d_scan_combined(*inputs, inputs[0], 4, activation="relu")


# ---- installation -----------------------------------------------------------------------------


def test_install_outside_of_cpu_mode_is_refused() -> None:
    assert not cpu_mode.is_active()
    with pytest.raises(RuntimeError, match=r"CPU mode, which is not active.*pretrain_hybrid"):
        ssd.install()
    assert "mamba_ssm" not in sys.modules


def test_install_beside_the_real_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("mamba_ssm")
    real.__spec__ = ModuleSpec("mamba_ssm", None)
    monkeypatch.setitem(sys.modules, "mamba_ssm", real)
    monkeypatch.setattr(cpu_mode, "is_active", lambda: True)
    with pytest.raises(ImportError, match="mamba_ssm can be imported already"):
        ssd.install()
    assert sys.modules["mamba_ssm"] is real


def test_install_after_the_mixer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MIXER, ModuleType(MIXER))
    monkeypatch.setattr(cpu_mode, "is_active", lambda: True)
    with pytest.raises(RuntimeError, match="mamba_mixer was imported before the stand-in"):
        ssd.install()
    assert "mamba_ssm" not in sys.modules


@pytest.mark.slow
def test_mixer_takes_what_is_installed() -> None:
    passes(
        """
from runtime import cpu_mode
cpu_mode.activate()
from tests.functional_tests.parts import ssd
ssd.install()
from megatron.core.ssm import mamba_mixer
assert mamba_mixer.HAVE_MAMBA_SSM
assert mamba_mixer.MAMBA_HAS_STATE_DTYPE
assert mamba_mixer.mamba_chunk_scan_combined is ssd.mamba_chunk_scan_combined
assert mamba_mixer.mamba_split_conv1d_scan_combined is ssd.mamba_split_conv1d_scan_combined
assert issubclass(mamba_mixer.ExtendedRMSNorm, ssd.RMSNorm)
"""
    )
