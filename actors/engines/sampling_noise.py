"""Sampling noise that depends on nothing but (sample seed, position, token).

Each logit gets exponential noise from a counter-based generator: the 64-bit finalizer of
SplitMix64 over a key made of seed and position, plus the token's index. No generator state
exists, so batch order, placement, moves and restarts cannot change what is drawn.

Sources: G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014 (SplitMix64, and its constants); the exponential form of the Gumbel-max trick,
argmax p_i / e_i with e_i ~ Exp(1).
"""

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_MASK64 = (1 << 64) - 1


def _signed(x: int) -> int:
    """The int64 with the same bits as the unsigned 64-bit ``x``."""
    return x - (1 << 64) if x >> 63 else x


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK64
    return x ^ (x >> 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def noise_key(seed: int, position: int) -> int:
    """Signed 64-bit key of one draw. ``position``: index of the token that is drawn, counted
    from the start of the prompt."""
    return _signed(_mix_int((_mix_int(seed & _MASK64) + (position + 1) * _GOLDEN) & _MASK64))


def exponential_noise(keys_B: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exp(1) noise, float32, shape [B, vocab_size].

    Args:
        keys_B: int64 keys from ``noise_key``, on the device where the noise is wanted.
    """
    index_V = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=keys_B.device)
    x = keys_B[:, None] + index_V * _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX2)
    bits32 = _shift_right(x ^ _shift_right(x, 31), 32)
    # The small end of u decides who wins; it keeps float32's relative precision down to 2^-33.
    u = (bits32.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log1p(-u.clamp(max=1 - 2.0**-24))


def draw(logits_BV: torch.Tensor, keys_B: torch.Tensor) -> torch.Tensor:
    """One token per row, int64 [B], distributed as softmax(logits)."""
    noise = exponential_noise(keys_B, logits_BV.shape[-1])
    return torch.argmax(logits_BV.to(torch.float32) - torch.log(noise), dim=-1)
