# SPDX-License-Identifier: Apache-2.0
"""Mamba's state-space scan in plain torch, in place of ``mamba_ssm`` on machines without a GPU.

``mamba_ssm`` is CUDA and Triton code. For tests, :func:`install` puts the three names that
Megatron's Mamba mixer imports from it into ``sys.modules``; nothing else of the tree does.

The scan of one head, with state ``h`` of shape ``(P, N)``::

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T        y_t = h_t C_t + D x_t

is computed in chunks (state-space duality): a masked product within each chunk, and a recurrence
over the states at the ends of chunks. Shapes: batch b, length l, heads h, head width p, groups g,
state width n.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
import torch.nn.functional as F

PACKAGE = "mamba_ssm"


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the scan's output ``(b, l, h, p)`` in the dtype of *x*.

    Args:
        x: Input ``(b, l, h, p)``.
        dt: Step sizes ``(b, l, h)``.
        A: Decay rates ``(h,)``, negative.
        B: Input projections ``(b, l, g, n)``; ``h / g`` neighbouring heads share one.
        C: Output projections ``(b, l, g, n)``.
        chunk_size: Length of a chunk; the last one may be shorter.
        D: Skip weights ``(h,)`` or ``(h, p)``.
        z: Gate ``(b, l, h, p)``: the output is multiplied with ``silu(z)``.
        dt_bias: Added to *dt* first, ``(h,)``.
        initial_states: For inference; not supported.
        dt_softplus: Apply softplus to *dt* next.
        return_final_states: For inference; not supported.
        state_dtype: Dtype in which the states between chunks are kept.
    """
    _refuse(initial_states=initial_states, return_final_states=return_final_states or None)
    work = torch.promote_types(x.dtype, torch.float32)
    length, heads, groups = x.size(1), x.size(2), B.size(2)
    step = dt.to(work)
    if dt_bias is not None:
        step = step + dt_bias
    if dt_softplus:
        step = F.softplus(step)

    # (b, l, ...) -> (b, chunks, chunk_size, ...); a step of zero neither decays nor adds.
    def chunked(tensor: torch.Tensor) -> torch.Tensor:
        missing = -length % chunk_size
        padded = F.pad(tensor.to(work), (0, 0) * (tensor.dim() - 2) + (0, missing))
        return padded.unflatten(1, (-1, chunk_size))

    inputs = chunked(x * step.unsqueeze(-1))
    b = chunked(B.repeat_interleave(heads // groups, dim=2))
    c = chunked(C.repeat_interleave(heads // groups, dim=2))
    decay = chunked(step * A).cumsum(2)  # log of the decay since before the chunk

    # log of the decay from position j to position i: (b, chunks, i, j, h)
    between = decay.unsqueeze(3) - decay.unsqueeze(2)
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool).triu(1).unsqueeze(-1)
    weights = torch.einsum("bcihn,bcjhn->bcijh", c, b)
    weights = weights * between.masked_fill(future, -torch.inf).exp()
    y = torch.einsum("bcijh,bcjhp->bcihp", weights, inputs)

    to_end = (decay[:, :, -1:] - decay).exp()
    added = torch.einsum("bcjhn,bcjh,bcjhp->bchpn", b, to_end, inputs)
    state, before = torch.zeros_like(added[:, 0]), []
    for chunk in range(added.size(1)):
        before.append(state)
        state = state * decay[:, chunk, -1].exp()[..., None, None] + added[:, chunk]
        state = state.to(state_dtype or work).to(work)
    y = y + torch.einsum("bcihn,bcih,bchpn->bcihp", c, decay.exp(), torch.stack(before, 1))

    y = y.flatten(1, 2)[:, :length]
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D.unsqueeze(-1))
    if z is not None:
        y = y * F.silu(z.to(work))
    return y.to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    seq_idx: None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Split, convolve, scan and gate; return ``(b, l, h * p)``.

    Args:
        zxbcdt: Gate, input, B, C and step sizes, ``(b, l, 2 h p + 2 g n + h)``.
        conv1d_weight: Causal depthwise convolution of input, B and C, ``(h p + 2 g n, width)``.
        conv1d_bias: ``(h p + 2 g n,)``.
        dt_bias: See :func:`mamba_chunk_scan_combined`; softplus is always applied.
        A: Decay rates ``(h,)``.
        D: Skip weights ``(h,)``, or ``(h, p)`` without *headdim*.
        chunk_size: Length of a chunk.
        seq_idx: For packed sequences; not supported.
        activation: Of the convolution: ``silu``.
        headdim: Head width p; from *D* by default.
        ngroups: Groups g.
        norm_before_gate: Only matters to a norm within, which is not asked for here.
        state_dtype: See :func:`mamba_chunk_scan_combined`.
    """
    _refuse(seq_idx=seq_idx, activation=None if activation in ("silu", "swish") else activation)
    heads = D.size(0)
    width = D.size(1) if headdim is None else headdim
    inner, channels = heads * width, conv1d_weight.size(0)
    z, xbc, dt = zxbcdt.split([inner, channels, heads], dim=-1)
    taps = conv1d_weight.size(1)
    padded = F.pad(xbc.transpose(1, 2), (taps - 1, 0))
    xbc = F.silu(F.conv1d(padded, conv1d_weight.unsqueeze(1), conv1d_bias, groups=channels))
    x, b, c = xbc.transpose(1, 2).split([inner, *[(channels - inner) // 2] * 2], dim=-1)
    return mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, width)),
        dt,
        A,
        b.unflatten(-1, (ngroups, -1)),
        c.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D=D,
        z=z.unflatten(-1, (heads, width)),
        dt_bias=dt_bias,
        dt_softplus=True,
        state_dtype=state_dtype,
    ).flatten(2)


class RMSNorm(torch.nn.Module):
    """RMS norm over groups of channels, with an optional gate before or after it."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: object = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalised *x* ``(..., channels)``, gated by ``silu(z)`` if there is a *z*."""
        work = torch.promote_types(x.dtype, torch.float32)
        gate = None if z is None else F.silu(z.to(work))
        y = x.to(work)
        if gate is not None and not self.norm_before_gate:
            y = y * gate
        y = F.rms_norm(y.unflatten(-1, (-1, self.group_size)), (self.group_size,), eps=self.eps)
        y = y.flatten(-2) * self.weight
        if gate is not None and self.norm_before_gate:
            y = y * gate
        return y.to(x.dtype)


def install() -> None:
    """Put the stand-ins where Megatron's Mamba mixer imports them from.

    Raises:
        RuntimeError: It is not in CPU mode, or the mixer has been imported already.
        ImportError: The real ``mamba_ssm`` is importable.
    """
    from runtime import cpu_mode

    if not cpu_mode.is_active():
        raise RuntimeError(
            f"The stand-in for {PACKAGE} is for CPU mode, which is not active: run with "
            "--distributed-backend gloo where no GPU is visible, or use pretrain_hybrid.py."
        )
    if importlib.util.find_spec(PACKAGE) is not None:
        raise ImportError(
            f"{PACKAGE} can be imported already; its stand-in would hide it. Use "
            "pretrain_hybrid.py, or an environment without it."
        )
    if "megatron.core.ssm.mamba_mixer" in sys.modules:
        raise RuntimeError(
            f"megatron.core.ssm.mamba_mixer was imported before the stand-in for {PACKAGE}: "
            "install it first."
        )
    scan = {f.__name__: f for f in (mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined)}
    contents: dict[str, dict[str, object]] = {
        PACKAGE: {},
        f"{PACKAGE}.ops": {},
        f"{PACKAGE}.ops.triton": {},
        f"{PACKAGE}.ops.triton.ssd_combined": {**scan},
        f"{PACKAGE}.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"The stand-in for {PACKAGE} does not support {name}={value!r}.")
