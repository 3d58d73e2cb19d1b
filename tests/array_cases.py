"""Array expressions with the values that NumPy gives: for tests on the host and on a device."""

from typing import Any

import numpy as np
from scipy import special

from autotile.kernel.expressions import Kind

KINDS: dict[str, Kind] = {"N": "number", "K": "number", "FLAG": "boolean"}


def environment() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "A": rng.standard_normal((3, 4)).astype(np.float32),
        "B": rng.standard_normal((4, 5)),
        "S": rng.standard_normal((2, 3, 4)),
        "v": rng.standard_normal(4),
        "p": rng.random(4) + 0.5,
        "i": np.array([3, 0, 2, 2], np.int32),
        "j": np.array([[0, 2], [1, 1]], np.uint8),
        "big": np.array([2**63 + 1, 2**53 + 1, 5, 7], np.uint64),
        "long": np.array([2**53 + 1, -3, 0, 9], np.int64),
        "flag": np.array([True, False, True, True]),
        "z": (rng.standard_normal(4) + 1j * rng.standard_normal(4)).astype(np.complex64),
        "image": rng.standard_normal((6, 7)),
        "batch": rng.standard_normal((2, 3, 6, 7)),
        "filters": rng.standard_normal((4, 3, 2, 3)),
        "offsets": np.array([0, 1, 1, 4], np.int32),
        "alpha": 0.75,
        "N": 4,
        "K": 2,
        "FLAG": 1,
    }


E = environment()
A, B, S, v, p, i, j, z = (E[name].astype(float) if name in "ABSvp" else E[name] for name in "ABSvpijz")
long, big, flag, image = E["long"], E["big"], E["flag"], E["image"]


def conv2d() -> np.ndarray:
    x, w = E["batch"], E["filters"]
    result = np.zeros((2, 4, 5, 5))
    for b, o, h, t in np.ndindex(*result.shape):
        result[b, o, h, t] = (x[b, :, h : h + 2, t : t + 3] * w[o]).sum()
    return result


WINDOWS = np.lib.stride_tricks.sliding_window_view(image, (2, 3))
CASES: dict[str, Any] = {
    # indexing and slicing
    "v[1:-1]": v[1:-1],
    "A[:, None] + S[:1]": A[:, None] + S[:1],
    "v[::2]": v[::2],
    "v[::-1]": v[::-1],
    "v[N // 2:]": v[2:],
    "v[N - 1]": v[3],
    "A[-1, ..., 1:K + 1]": A[-1, 1:3],
    "S[..., 0]": S[..., 0],
    "v[i]": v[i],
    "A[:, i]": A[:, i],
    "S[1][j]": S[1][j],
    "A[j, i[:2]]": A[j, i[:2]],
    "v[i - 4]": v[i - 4],
    "take(v, j)": v[j],
    "take(A, i, axis=1)": A[:, i],
    # arithmetic of whole numbers
    "long + 1": long + 1,
    "big ^ 1": big ^ np.uint64(1),
    "(big >> 3) & 7": (big >> np.uint64(3)) & np.uint64(7),
    "~i | 8": ~i.astype(np.int64) | 8,
    "i << K": i.astype(np.int64) << 2,
    "i & 2.0": i & 2,
    "1.0 << i": 1 << i,
    "i | 4 / 2": i | 2,
    "i // 2 + i % 2": i // 2 + i % 2,
    "i / 2": i / 2,
    # a power is whole where its exponent is a literal from 0
    "i ** 3": i.astype(np.int64) ** 3,
    "i ** 0": np.ones(4, np.int64),
    "i ** -1": np.array([1 / 3, np.inf, 0.5, 0.5]),
    "i ** -1.0": np.array([1 / 3, np.inf, 0.5, 0.5]),
    "i ** 2.0": i * i * 1.0,
    "i ** i": np.array([27.0, 1.0, 4.0, 4.0]),
    "2 ** i": np.array([8.0, 1.0, 4.0, 4.0]),
    "flag + flag": flag.astype(int) * 2,
    "1 - flag": 1 - flag.astype(int),
    "flag & (v < 1)": flag & (v < 1),
    "~flag": ~flag,
    "sum(flag)": 3,
    "N ** 40 * 0 + N * N": 16.0,
    "N * N * N": 64,
    "N ** K // 3": 5,
    "alpha * (A @ B) - 1 / N": 0.75 * (A @ B) - 0.25,
    "-A ** 2 / 3 + v": -(A**2) / 3 + v,
    # conditions
    "where(v > 0, v, -1)": np.where(v > 0, v, -1),
    "where(i, 1, 0)": np.where(i, 1, 0),
    "-1 < v < 1": (v > -1) & (v < 1),
    "(v == v[0]) | (v != v)": (v == v[0]),
    "clip(v, -0.5, 0.5)": v.clip(-0.5, 0.5),
    "any(A > 1, axis=0)": (A > 1).any(0),
    "all(A < 9)": True,
    "2 * (A if FLAG else v)": 2 * A,
    "A if not FLAG else 2 * v": 2 * v,
    "A if K > 1 or not FLAG else A @ A": A,  # what is not chosen is not computed
    # reductions, scans, sorting
    "sum(S, axis=(0, 2))": S.sum((0, 2)),
    "sum(A, axis=1, keepdims=True)": A.sum(1, keepdims=True),
    "exp(A) / sum(exp(A), axis=-1, keepdims=True)": special.softmax(A, -1),
    "max(A, 0) - min(A, 0)": A.max(0) - A.min(0),
    "prod(A, 1)": A.prod(1),
    "var(A) + std(A, axis=0)": A.var() + A.std(0),
    "argmax(A, axis=1)": A.argmax(1),
    "argmin(v)": v.argmin(),
    "cumsum(A)": A.cumsum(),
    "cumsum(i)": i.cumsum(),
    "cumprod(A, axis=1)": A.cumprod(1),
    "sort(A)": np.sort(A),
    "sort(A, axis=0)": np.sort(A, 0),
    "argsort(i)": np.argsort(i, kind="stable"),
    "mean(A) + mean(A, -1)": A.mean() + A.mean(1),
    # functions
    "exp(v) + log(abs(v)) + sqrt(v * v) + tanh(v)": np.exp(v) + np.log(abs(v)) + abs(v) + np.tanh(v),
    "maximum(A, 0) + minimum(A, v)": np.maximum(A, 0) + np.minimum(A, v),
    "floor(A) + ceil(A) + round(A) + trunc(A)": np.floor(A) + np.ceil(A) + np.rint(A) + np.trunc(A),
    "sin(v) * cos(v) + tan(v) + arctan2(v, p)": np.sin(v) * np.cos(v) + np.tan(v) + np.arctan2(v, p),
    "sinh(v) + cosh(v) + arcsinh(v)": np.sinh(v) + np.cosh(v) + np.arcsinh(v),
    "exp2(v) + log2(p) + log10(p) + log1p(p) + expm1(v)": (
        np.exp2(v) + np.log2(p) + np.log10(p) + np.log1p(p) + np.expm1(v)
    ),
    "erf(v) + erfc(v / 2)": special.erf(v) + special.erfc(v / 2),
    "rsqrt(p)": p**-0.5,
    "pow(p, v)": p**v,
    "mod(v, 0.5) - v % 0.5": np.zeros(4),
    "hypot(v, p) + square(v) + sign(v)": np.hypot(v, p) + v**2 + np.sign(v),
    "float32(1 / p)": (1 / p).astype(np.float32).astype(float),
    "int(v * 10)": (v * 10).astype(np.int64),
    "cos(pi * v)": np.cos(np.pi * v),
    "minimum(v, inf)": v,
    "isfinite(v / (i * 1.0))": np.array([True, False, True, True]),
    # complex numbers
    "z * 2j + conj(z)": z.astype(complex) * 2j + z.conj(),
    "real(z) ** 2 + imag(z) ** 2 - abs(z) ** 2": np.zeros(4),
    "exp(1j * v)": np.exp(1j * v),
    # rearrangement
    "A.T": A.T,
    "S.T": S.T,
    "transpose(S)": np.swapaxes(S, 1, 2),
    "transpose(v)": v,
    "permute(S, 2, 0, 1)": S.transpose(2, 0, 1),
    "reshape(A, (2, -1))": A.reshape(2, -1),
    "reshape(A, 2, N + 2)": A.reshape(2, 6),
    "ravel(A)": A.ravel(),
    "flip(A, axis=1)": A[:, ::-1],
    "roll(v, 1) + roll(v, -1)": np.roll(v, 1) + np.roll(v, -1),
    "roll(A, (1, 2), axis=(0, 1))": np.roll(A, (1, 2), (0, 1)),
    "repeat(v, K)": np.repeat(v, 2),
    "repeat(A, 3, axis=1)": np.repeat(A, 3, 1),
    "tile(v, 2, 3)": np.tile(v, (2, 3)),
    "broadcast_to(v, (3, N))": np.broadcast_to(v, (3, 4)),
    "concatenate((v, i, p[:1]))": np.concatenate([v, i, p[:1]]),
    "concatenate([A, A], axis=1)": np.concatenate([A, A], 1),
    "stack((v, p), axis=-1)": np.stack([v, p], -1),
    "pad(v, 1)": np.pad(v, 1),
    "pad(A, ((1, 2), (0, 3)), value=7)": np.pad(A, ((1, 2), (0, 3)), constant_values=7),
    "pad(v, (2, 1), mode='edge')": np.pad(v, (2, 1), "edge"),
    "shift(v, 1) + shift(v, -1)": np.append(v[1:], 0) + np.append(0, v[:-1]),
    "tril(A) - triu(A, k=1)": np.tril(A) - np.triu(A, 1),
    "diagonal(S)": np.diagonal(S, 0, -2, -1),
    # products and filters
    "einsum('ij,jk->ik', A, B)": A @ B,
    "einsum('bij,jk,i->bk', S, B, A[:, 0])": np.einsum("bij,jk,i->bk", S, B, A[:, 0]),
    "einsum('ij->', A)": A.sum(),
    "einsum('ij->ij', A)": A,
    "einsum('ij->ji', A)": A.T,
    "einsum('bij->jbi', S)": S.transpose(2, 0, 1),
    "einsum('ij->j', A)": A.sum(0),
    "einsum('ij,ij->ij', A, A)": A * A,
    "einsum('ij,j->ij', A, v)": A * v,
    "einsum('i,j->ij', v, p)": np.outer(v, p),
    "einsum('i,j->ji', v, p)": np.outer(p, v),
    "einsum('i,j->', v, p)": v.sum() * p.sum(),
    "einsum('i,i->i', v, v)": v * v,
    "einsum(' i j , j k -> i k ', A, B)": A @ B,
    "einsum('i,j,k->kij', v, p, v)": np.einsum("i,j,k->kij", v, p, v),
    "einsum('bii->bi', S[:, :3, :3])": np.diagonal(S[:, :3, :3], 0, 1, 2),
    "einsum('bii->b', S[:, :3, :3])": np.trace(S[:, :3, :3], 0, 1, 2),
    "dot(A, v)": A @ v,
    "outer(v, p)": np.outer(v, p),
    "A @ B @ B.T": A @ B @ B.T,
    "i @ i": 17,
    "S @ B": S @ B,
    "S[:1] @ transpose(S)": S[:1] @ np.swapaxes(S, 1, 2),
    "S[:, None] @ transpose(S)": S[:, None] @ np.swapaxes(S, 1, 2),
    "transpose(transpose(B) @ transpose(S))": S @ B,
    "correlate(image, image[:2, :3])": np.einsum("abij,ij->ab", WINDOWS, image[:2, :3]),
    "correlate(batch, image[:2, :3])[1, 2]": (
        np.einsum("abij,ij->ab", np.lib.stride_tricks.sliding_window_view(E["batch"][1, 2], (2, 3)), image[:2, :3])
    ),
    "sum(sliding_window(image, 2, 3), axis=(2, 3))": WINDOWS.sum((2, 3)),
    "conv2d(batch, filters)": conv2d(),
    # creation
    "arange(N)": np.arange(4),
    "arange(1, N, 2) + 0.5": np.arange(1, 4, 2) + 0.5,
    "zeros(K, N) + ones(N) + full((K, N), 2.5) + full(N, 1)": np.full((2, 4), 4.5),
    "eye(N) @ v": v,
    "linspace(0, 1, N)": np.linspace(0, 1, 4),
    # counting and scattering
    "bincount(i, N)": np.bincount(i, minlength=4),
    "bincount(i, N, v)": np.bincount(i, v, 4),
    "histogram(v, 3, -2, 2)": np.histogram(v, 3, (-2, 2))[0],
    "segment_sum(v, offsets)": np.array([v[0], 0, v[1:].sum()]),
    "segment_sum(A.T, offsets)": np.array([A.T[0], np.zeros(3), A.T[1:].sum(0)]),
    "scatter_add(zeros(5), i, v)": np.bincount(i, v, 5),
    "scatter_add(i * 0, i, 2)": np.bincount(i, minlength=4) * 2,
    "searchsorted(sort(v), v)": np.argsort(np.argsort(v)),
    "searchsorted(offsets, arange(N), side='right') - 1": np.array([0, 2, 2, 2]),
    # sparse matrix-vector product, and assignments
    "segment_sum(v * p[i], offsets)": np.array([v[0] * p[3], 0, (v * p[i])[1:].sum()]),
    "t = A @ B; u = maximum(t, 0); u / sum(u)": np.maximum(A @ B, 0) / np.maximum(A @ B, 0).sum(),
}
