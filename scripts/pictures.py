"""Draws the pictures of docs/masks.md from the masks themselves: `python scripts/pictures.py [--check]`.

A picture has a square per (query, key) pair, queries downwards. Tiles of 8 x 8 are those a kernel would meet:
grey ones are skipped, dark ones are seen whole and need no comparison, only the others are compared pair by
pair.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from polyflash import Mask

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "masks"
ROWS, KEYS, TILE, SIDE = 32, 40, 8, 6
SKIPPED, WHOLE, SEEN, UNSEEN = "#e4e6ea", "#1f4e8c", "#5b9bd5", "#ffffff"


def _ids(*lengths: int) -> torch.Tensor:
    parts = [torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)]
    return torch.cat(parts)[None]


def _one(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _random() -> torch.Tensor:
    return torch.rand(ROWS, KEYS, generator=torch.Generator().manual_seed(3)) < 0.5


_GRID = torch.tensor([[1, 0, 0, 1, 0], [0, 1, 0, 0, 1], [1, 1, 0, 0, 0], [0, 0, 0, 1, 1]], dtype=torch.bool)
_STARTS = torch.tensor([[0, 12], [0, 20], [8, 30], [0, 35]], dtype=torch.int32)
_ENDS = torch.tensor([[8, 18], [6, 26], [16, 40], [4, 40]], dtype=torch.int32)
MASKS: dict[str, Mask | torch.Tensor] = {
    "causal": Mask.causal(),
    "top-left": Mask.causal("top_left"),
    "window": Mask.window(6, 3),
    "causal-window": Mask.causal() & Mask.window(10, None),
    "lengths": Mask.lengths(_one(29), _one(5)),
    "causal-lengths": Mask.causal() & Mask.lengths(_one(29)),
    "segments": Mask.segments(_ids(9, 16, 7), _ids(12, 18, 10)),
    "causal-documents": Mask.causal("top_left") & Mask.segments(_ids(9, 16, 7), _ids(9, 16, 15)),
    "blocks": Mask.blocks(_GRID, rows=8, keys=8),
    "intervals": Mask.intervals(_STARTS, _ENDS, rows=8),
    "bool": _random(),
}


def picture(mask: Mask | torch.Tensor) -> str:
    """The mask as SVG text."""

    def sees(i: int, j: int) -> bool:
        if isinstance(mask, Mask):
            return mask.visible(i, j, seqlen_q=ROWS, seqlen_k=KEYS)
        return bool(mask[i, j])

    seen = [[sees(i, j) for j in range(KEYS)] for i in range(ROWS)]
    width, height = KEYS * SIDE, ROWS * SIDE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">'
    ]

    def square(i: int, j: int, size: int, colour: str) -> None:
        at = f'x="{j * SIDE}" y="{i * SIDE}" width="{size * SIDE}" height="{size * SIDE}"'
        parts.append(f'<rect {at} fill="{colour}"/>')

    for i_m in range(0, ROWS, TILE):
        for i_n in range(0, KEYS, TILE):
            pairs = [(i, j) for i in range(i_m, i_m + TILE) for j in range(i_n, i_n + TILE)]
            count = sum(seen[i][j] for i, j in pairs)
            square(i_m, i_n, TILE, SKIPPED if count == 0 else WHOLE if count == TILE * TILE else UNSEEN)
            if 0 < count < TILE * TILE:
                for i, j in pairs:
                    if seen[i][j]:
                        square(i, j, 1, SEEN)
    lines = [f"M0 {y * TILE * SIDE}H{width}" for y in range(ROWS // TILE + 1)]
    lines += [f"M{x * TILE * SIDE} 0V{height}" for x in range(KEYS // TILE + 1)]
    parts.append(f'<path d="{"".join(lines)}" stroke="#9aa3af" stroke-width="0.7" fill="none"/></svg>\n')
    return "".join(parts)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    """Writes the pictures; with --check names those that differ and returns 1."""
    wanted = {FOLDER / f"{name}.svg": picture(mask) for name, mask in MASKS.items()}
    changed = [path for path, text in wanted.items() if _text(path) != text]
    if "--check" in sys.argv[1:]:
        print(
            "\n".join(
                f"{path.name} differs from its mask: run python scripts/pictures.py" for path in changed
            )
        )
        return 1 if changed else 0
    FOLDER.mkdir(exist_ok=True)
    for path in changed:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
