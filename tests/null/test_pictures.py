"""The pictures of docs/masks.md are those of the masks they name."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import pictures

ROOT = Path(__file__).resolve().parents[2]


def test_every_picture_is_drawn_from_its_mask_and_shown():
    shown = set(re.findall(r"\(masks/([\w-]+)\.svg\)", (ROOT / "docs" / "masks.md").read_text("utf-8")))
    assert shown == set(pictures.MASKS)
    for name, mask in pictures.MASKS.items():
        assert (pictures.FOLDER / f"{name}.svg").read_text("utf-8") == pictures.picture(mask), name


def test_a_picture_shows_skipped_whole_and_cut_tiles():
    text = pictures.picture(pictures.MASKS["causal"])
    tiles = [
        text.count(f'width="48" height="48" fill="{c}"')
        for c in (pictures.SKIPPED, pictures.WHOLE, "#ffffff")
    ]
    assert tiles == [6, 10, 4]
