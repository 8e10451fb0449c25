"""DTensors as operands: each rank's own rows of them, and a DTensor of the results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from polyflash.errors import described, spec_error


class Local(NamedTuple):
    """q, k and v of this rank, the mesh that they are spread over, and what makes results of its rows
    DTensors again; `wrap` is None where nothing was one."""

    q: Any
    k: Any
    v: Any
    mesh: Any
    wrap: Callable[[Tensor, int], Tensor] | None = None


def local_of(q: Any, k: Any, v: Any, rows: int, mesh: Any, group: Any) -> Local:
    """This rank's part of operands that are DTensors, sharded along dimension `rows` over one mesh dimension,
    or the operands as they are.

    Raises:
        SpecError: some of q, k and v are none, or are sharded otherwise, or over another mesh than given."""
    tensors = sys.modules.get("torch.distributed.tensor")  # without it there is none
    given = {"q": q, "k": k, "v": v}
    known = tensors is not None and any(isinstance(x, tensors.DTensor) for x in given.values())
    if tensors is None or not known:
        return Local(q, k, v, mesh)
    change = f"Use distribute_tensor(x, mesh, [Shard({rows})]), or x.to_local() of all three."
    for name, x in given.items():
        wanted = f"a DTensor with placements (Shard(dim={rows}),), as q, k and v alike"
        if not isinstance(x, tensors.DTensor):
            raise spec_error(name, described(x), wanted, change)
        if x.placements != (tensors.Shard(rows),) or x.device_mesh != q.device_mesh:
            raise spec_error(name, f"{x.placements} over {x.device_mesh}", wanted, change)
    if group is not None or (mesh is not None and mesh != q.device_mesh):
        raise spec_error("mesh", "another one than q's", f"None, or {q.device_mesh}", "Leave it out.")
    own = q.device_mesh

    def wrap(x: Tensor, dim: int) -> Tensor:
        shape = [*x.shape]
        shape[dim] = q.shape[rows]
        dense, step = [0] * x.ndim, 1
        for i in sorted(range(x.ndim), key=x.stride):
            dense[i], step = step, step * shape[i]
        made: Tensor = tensors.DTensor.from_local(
            x, own, [tensors.Shard(dim)], run_check=False, shape=tuple(shape), stride=tuple(dense)
        )
        return made

    return Local(q.to_local(), k.to_local(), v.to_local(), own, wrap)
