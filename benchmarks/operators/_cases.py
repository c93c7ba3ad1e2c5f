"""The torch operators that are measured, each at several sizes. Cotangents are random: XLA would fold constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

aten = torch.ops.aten
Tensors = list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator at one size.

    Attributes:
        operator: the overload that is measured.
        title: a short description of the arguments.
        function: a torch function that runs the operator once, with random arguments from `make`.
        make: returns the arguments, as tensors.
    """

    operator: Any
    title: str
    function: Callable[..., Any]
    make: Callable[[], Tensors]


def cases() -> Iterator[Case]:
    """Return all cases, family by family, from small to large sizes."""
    yield from _convolutions()
    yield from _products()
    yield from _attention()
    yield from _rows()
    yield from _images()
    yield from _indexing()
    yield from _transforms()
    yield from _linear_algebra()
    yield from _normalization()


# Title, batch, channels in and out, groups, spatial size, kernel, stride, and whether it is transposed.
_Geometry = tuple[str, int, int, int, int, tuple[int, ...], int, int, bool]


def _geometries() -> Iterator[_Geometry]:
    for b, c, n in ((1, 16, 64), (4, 32, 256), (8, 64, 1024)):
        yield "1d", b, c, c, 1, (n,), 5, 1, False
        yield "1d pointwise", b, c, c, 1, (n,), 1, 1, False
        yield "1d depthwise", b, c, c, c, (n,), 5, 1, False
        yield "1d transposed", b, c, c, 1, (n,), 4, 2, True
    for b, c, n in ((1, 8, 8), (1, 16, 16), (2, 32, 28), (4, 64, 28), (4, 64, 56)):
        yield "2d", b, c, c, 1, (n, n), 3, 1, False
        yield "2d pointwise", b, c, 2 * c, 1, (n, n), 1, 1, False
        yield "2d depthwise", b, c, c, c, (n, n), 7, 1, False
        yield "2d small depthwise", b, c, c, c, (n, n), 3, 1, False
        yield "2d grouped", b, c, c, 4, (n, n), 3, 1, False
        yield "2d transposed", b, c, c, 1, (n, n), 4, 2, True
    for b, c, n in ((1, 4, 8), (1, 16, 16), (2, 32, 16)):
        yield "3d", b, c, c, 1, (n, n, n), 3, 1, False
        yield "3d pointwise", b, c, 2 * c, 1, (n, n, n), 1, 1, False
        yield "3d depthwise", b, c, c, c, (n, n, n), 3, 1, False
        yield "3d transposed", b, c, c, 1, (n, n, n), 2, 2, True


_MASKS = ((True, True, False), (False, True, False), (True, False, False))


def _convolutions() -> Iterator[Case]:
    for title, batch, ins, outs, groups, size, kernel, stride, transposed in _geometries():
        n = len(size)
        weight = (ins, outs // groups) if transposed else (outs, ins // groups)
        shapes = (batch, ins, *size), (*weight, *[kernel] * n)
        padding = (kernel - stride) // 2 if transposed else kernel // 2
        geometry = [stride] * n, [padding] * n, [1] * n, transposed, [0] * n, groups
        about = f"{title} {batch}x{ins}x{'x'.join(map(str, size))}"
        yield Case(
            aten.convolution.default,
            about,
            lambda x, w, geometry=geometry: aten.convolution(x, w, None, *geometry),
            lambda shapes=shapes: [torch.randn(shape) for shape in shapes],
        )
        result = aten.convolution(*[torch.empty(shape, device="meta") for shape in shapes], None, *geometry).shape
        for mask in _MASKS:
            yield Case(
                aten.convolution_backward.default,
                f"{about} {mask}",
                lambda g, x, w, geometry=geometry, mask=mask: [
                    y for y in aten.convolution_backward(g, x, w, [0], *geometry, mask) if y is not None
                ],
                lambda shapes=shapes, result=result: [torch.randn(shape) for shape in (result, *shapes)],
            )


def _products() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n in (32, 128, 256, 512, 1024):
            yield _simple(aten.mm.default, f"{n} {dtype}", lambda n=n, d=dtype: [_randn(n, n, dtype=d) for _ in "ab"])
            yield _simple(
                aten.addmm.default,
                f"{n} {dtype}",
                lambda n=n, d=dtype: [_randn(n, dtype=d), *(_randn(n, n, dtype=d) for _ in "ab")],
            )
        for b, n, k in ((4, 16, 16), (16, 64, 64), (24, 128, 64), (48, 256, 64)):
            yield _simple(
                aten.bmm.default,
                f"{b}x{n}x{k} {dtype}",
                lambda b=b, n=n, k=k, d=dtype: [_randn(b, n, k, dtype=d), _randn(b, k, n, dtype=d)],
            )

    for dtype in (torch.float32, torch.bfloat16):
        for n in (32, 128, 256, 512, 1024):
            yield Case(
                aten.mm.default,
                f"first transposed {n} {dtype}",
                lambda a, b: a.t() @ b,
                lambda n=n, d=dtype: [_randn(n, n, dtype=d) for _ in "ab"],
            )
        for b, n, k in ((4, 16, 16), (16, 64, 64), (24, 128, 64), (48, 256, 64)):
            yield Case(
                aten.bmm.default,
                f"first transposed {b}x{n}x{k} {dtype}",
                lambda x, y: torch.bmm(x.transpose(1, 2), y),
                lambda b=b, n=n, k=k, d=dtype: [_randn(b, n, n, dtype=d), _randn(b, n, k, dtype=d)],
            )


def _attention() -> Iterator[Case]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    for dtype in (torch.float32, torch.bfloat16):
        for b, h, n, d in ((1, 4, 32, 32), (1, 8, 128, 64), (2, 12, 256, 64), (2, 12, 512, 64)):
            for causal in (False, True):
                about = f"{b}x{h}x{n}x{d} {dtype}{' causal' * causal}"

                def make(b: int = b, h: int = h, n: int = n, d: int = d, dtype: torch.dtype = dtype) -> Tensors:
                    return [_randn(b, h, n, d, dtype=dtype) for _ in "qkv"]

                def backward_arguments(make: Any = make, causal: bool = causal) -> Tensors:
                    q, k, v = make()
                    out, logsumexp = forward(q, k, v, 0.0, causal)
                    return [torch.randn_like(out), q, k, v, out, logsumexp]

                yield Case(forward.default, about, lambda q, k, v, c=causal: forward(q, k, v, 0.0, c)[0], make)
                yield Case(
                    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
                    about,
                    lambda g, q, k, v, out, sums, c=causal: aten._scaled_dot_product_flash_attention_for_cpu_backward(
                        g, q, k, v, out, sums, 0.0, c
                    ),
                    backward_arguments,
                )


_ROWS = ((8, 32), (64, 32), (4096, 32), (1, 512), (4, 4096), (64, 4096), (8, 131072))


def _rows() -> Iterator[Case]:
    """Return cases of operators along one dimension."""
    of_rows: dict[Any, Callable[..., Any]] = {
        aten.sort.default: lambda x: aten.sort(x, -1, False)[0],
        aten.sort.stable: lambda x: aten.sort.stable(x, stable=True, dim=-1),
        aten.topk.default: lambda x: aten.topk(x, 8, -1)[0],
        aten.kthvalue.default: lambda x: aten.kthvalue(x, 7, -1)[0],
        aten.median.dim: lambda x: aten.median.dim(x, -1),
        aten.cumsum.default: lambda x: aten.cumsum(x, -1),
        aten.cumprod.default: lambda x: aten.cumprod(x, -1),
        aten.logcumsumexp.default: lambda x: aten.logcumsumexp(x, -1),
        aten.cummax.default: lambda x: aten.cummax(x, -1),
        aten.argmax.default: lambda x: aten.argmax(x, -1),
        aten.max.dim: lambda x: aten.max.dim(x, -1),
    }
    for overload, function in of_rows.items():
        for dtype in (torch.float32, torch.int64):
            if dtype is torch.int64 and overload in (aten.logcumsumexp.default, aten.cumprod.default):
                continue
            for shape in _ROWS:
                yield Case(
                    overload,
                    f"{shape} {dtype}",
                    function,
                    lambda shape=shape, dtype=dtype: [
                        (1 + 0.01 * torch.randn(shape)) if dtype is torch.float32 else torch.randint(99, shape)
                    ],
                )


def _images() -> Iterator[Case]:
    """Return cases of sampling, resizing and pooling."""
    for b, c, n in ((1, 3, 8), (1, 16, 32), (4, 32, 64), (8, 32, 128)):
        image = (b, c, n, n)

        def with_grid(image: tuple[int, ...] = image) -> Tensors:
            return [torch.randn(image), torch.rand(image[0], *image[2:], 2) * 2 - 1]

        def with_cotangent(image: tuple[int, ...] = image, shape: Any = None) -> Tensors:
            return [torch.randn(shape or image), torch.randn(image)]

        half, twice = (b, c, n // 2, n // 2), (b, c, 2 * n, 2 * n)
        about = f"{b}x{c}x{n}x{n}"
        yield _simple(aten.grid_sampler_2d.default, about, with_grid, 0, 0, False)
        yield _simple(
            aten.grid_sampler_2d_backward.default,
            about,
            lambda image=image, grid=with_grid: [torch.randn(image), *grid()],
            0, 0, False, [True, True],
        )  # fmt: skip
        for name in ("bilinear", "bicubic"):
            yield _simple(getattr(aten, f"upsample_{name}2d").default, about, _image(image), list(twice[2:]), False)
            backward = getattr(aten, f"upsample_{name}2d_backward").default
            yield _simple(backward, about, _image(twice), list(twice[2:]), list(image), False)
        yield _simple(aten.upsample_nearest2d.default, about, _image(image), list(twice[2:]))
        yield _simple(aten.upsample_nearest2d_backward.default, about, _image(twice), list(twice[2:]), list(image))
        window = [3, 3], [2, 2], [1, 1]
        yield _simple(aten.max_pool2d_with_indices.default, about, _image(image), *window)
        yield Case(
            aten.max_pool2d_with_indices.default,
            f"{about} values",
            lambda x, w=window: aten.max_pool2d_with_indices(x, *w)[0],
            _image(image),
        )
        yield Case(
            aten.max_pool2d_with_indices_backward.default,
            about,
            lambda g, x, i, w=window: aten.max_pool2d_with_indices_backward(g, x, *w, [1, 1], False, i),
            lambda image=image, w=window: _pooled(image, w),
        )
        yield _simple(aten.avg_pool2d.default, about, _image(image), [2, 2])
        yield _simple(
            aten.avg_pool2d_backward.default,
            about,
            lambda image=image, half=half: with_cotangent(image, half),
            [2, 2], [2, 2], [0, 0], False, True, None,
        )  # fmt: skip
        yield _simple(aten._adaptive_avg_pool2d.default, about, _image(image), [7, 7])
        yield _simple(
            aten._adaptive_avg_pool2d_backward.default,
            about,
            lambda image=image: with_cotangent(image, (*image[:2], 7, 7)),
        )
    for b, c, n in ((1, 4, 8), (1, 16, 16), (2, 16, 32)):
        volume = (b, c, n, n, n)
        about = f"{b}x{c}x{n}x{n}x{n}"
        yield _simple(aten.max_pool3d_with_indices.default, about, _image(volume), [2, 2, 2])
        yield Case(
            aten.max_pool3d_with_indices.default,
            f"{about} values",
            lambda x: aten.max_pool3d_with_indices(x, [2, 2, 2])[0],
            _image(volume),
        )
        yield _simple(aten.avg_pool3d.default, about, _image(volume), [2, 2, 2])
        yield _simple(aten.upsample_trilinear3d.default, about, _image(volume), [2 * n] * 3, False)
        yield _simple(
            aten.grid_sampler_3d.default,
            about,
            lambda volume=volume: [torch.randn(volume), torch.rand(volume[0], *volume[2:], 3) * 2 - 1],
            0, 0, False,
        )  # fmt: skip


def _indexing() -> Iterator[Case]:
    for rows, taken, width in ((64, 128, 16), (1000, 4000, 32), (10000, 50000, 64)):
        about = f"{taken} of {rows}x{width}"

        def with_index(rows: int = rows, taken: int = taken, width: int = width) -> Tensors:
            return [torch.randn(rows, width), torch.randint(rows, (taken,)), torch.randn(taken, width)]

        yield Case(aten.index.Tensor, about, lambda x, i, y: aten.index(x, [i]), with_index)
        yield Case(aten.index_select.default, about, lambda x, i, y: aten.index_select(x, 0, i), with_index)
        yield Case(aten.index_add.default, about, lambda x, i, y: aten.index_add(x, 0, i, y), with_index)
        yield Case(aten.index_put.default, about, lambda x, i, y: aten.index_put(x, [i], y, True), with_index)

        def with_indices(rows: int = rows, taken: int = taken, width: int = width) -> Tensors:
            return [torch.randn(rows, width), torch.randint(rows, (taken, width)), torch.randn(taken, width)]

        for kind, index, make in (("rows of ", _expanded, with_index), ("", lambda i, y: i, with_indices)):
            title = kind + about
            yield Case(aten.gather.default, title, lambda x, i, y, at=index: aten.gather(x, 0, at(i, y)), make)
            yield Case(
                aten.scatter_add.default, title, lambda x, i, y, at=index: aten.scatter_add(x, 0, at(i, y), y), make
            )
            yield Case(
                aten.scatter_reduce.two,
                title,
                lambda x, i, y, at=index: aten.scatter_reduce(x, 0, at(i, y), y, "amax"),
                make,
            )
        yield Case(
            aten.embedding_dense_backward.default,
            about,
            lambda x, i, y: aten.embedding_dense_backward(y, i, len(x), -1, False),
            with_index,
        )
        yield Case(
            aten.searchsorted.Tensor,
            about,
            lambda x, y: aten.searchsorted(x, y),
            lambda rows=rows, n=taken * width: [torch.randn(rows).sort().values, torch.randn(n)],
        )


def _transforms() -> Iterator[Case]:
    for b, n in ((4, 64), (16, 1024), (64, 4096), (16, 65536)):
        about = f"{b}x{n}"
        signal = _image((b, n))
        yield _simple(aten._fft_r2c.default, about, signal, [1], 0, True)
        complex_signal = lambda b=b, n=n: [torch.randn(b, n, dtype=torch.complex64)]  # noqa: E731
        yield _simple(aten._fft_c2c.default, about, complex_signal, [1], 0, True)
        yield _simple(aten._fft_c2r.default, about, complex_signal, [1], 2, 2 * n - 2)


def _linear_algebra() -> Iterator[Case]:
    for b, n in ((16, 4), (4, 32), (1, 128), (1, 512)):

        def square(b: int = b, n: int = n) -> Tensors:
            x = torch.randn(b, n, n)
            return [x @ x.mT / n + torch.eye(n)]

        with_right = lambda b=b, n=n, square=square: [*square(), torch.randn(b, n, 4)]  # noqa: E731
        about = f"{b}x{n}x{n}"
        yield Case(aten.linalg_qr.default, about, lambda x: aten.linalg_qr(x)[1].abs(), square)
        yield Case(aten._linalg_eigh.default, about, lambda x: aten._linalg_eigh(x)[0], square)
        yield Case(aten._linalg_svd.default, about, lambda x: aten._linalg_svd(x)[1], square)
        yield Case(aten.linalg_cholesky_ex.default, about, lambda x: aten.linalg_cholesky_ex(x)[0], square)
        yield Case(aten.linalg_inv_ex.default, about, lambda x: aten.linalg_inv_ex(x)[0], square)
        yield Case(aten._linalg_solve_ex.default, about, lambda x, y: aten._linalg_solve_ex(x, y)[0], with_right)
        yield Case(
            aten.linalg_solve_triangular.default,
            about,
            lambda x, y: aten.linalg_solve_triangular(x, y, upper=False),
            with_right,
        )


def _normalization() -> Iterator[Case]:
    for rows, width in ((16, 64), (512, 768), (4096, 1024)):
        about = f"{rows}x{width}"
        yield _simple(aten._softmax.default, about, _image((rows, width)), -1, False)
        yield _simple(aten._log_softmax.default, about, _image((rows, width)), -1, False)
        yield Case(
            aten.native_layer_norm.default,
            about,
            lambda x, w, b: aten.native_layer_norm(x, [x.shape[-1]], w, b, 1e-5),
            lambda rows=rows, width=width: [torch.randn(rows, width), torch.randn(width), torch.randn(width)],
        )
        yield Case(
            aten._cdist_forward.default,
            about,
            lambda x, y: aten._cdist_forward(x, y, 2.0, None),
            lambda rows=rows: [torch.randn(min(rows, 1024), 16) for _ in "xy"],
        )


def _simple(overload: Any, title: str, make: Callable[[], Tensors], *rest: Any) -> Case:
    return Case(overload, title, lambda *tensors: overload(*tensors, *rest), make)


def _expanded(index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return index[:, None].expand(rows.shape)


def _image(shape: tuple[int, ...]) -> Callable[[], Tensors]:
    return lambda: [torch.randn(shape)]


def _pooled(shape: tuple[int, ...], window: Any) -> Tensors:
    x = torch.randn(shape)
    y, indices = aten.max_pool2d_with_indices(x, *window)
    return [torch.randn_like(y), x, indices]


def _randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)
