"""Shares of a chip's peaks: every chip has some, and every number a source."""

from pathlib import Path

import pytest

from ringformer.hardware import CHIPS
from ringformer.hardware.shares import KINDS, SHARES, Shares


def test_every_chip_has_shares_with_a_source():
    assert set(SHARES) == set(CHIPS)
    for name, shares in SHARES.items():
        assert shares.kind in KINDS and shares.source, name
        assert 0 < shares.attention < 1 and 0 < shares.products < 1 and 0 < shares.memory <= 1, name
    assert [name for name, shares in SHARES.items() if shares.kind == "measured"] == ["H200"]


def test_a_chip_like_another_has_its_numbers_and_says_that_they_are_assumed():
    assert SHARES["H100"].kind == "assumed" and SHARES["H100"].source.startswith("H200's")
    assert SHARES["H100"].cudnn(128) == SHARES["H200"].cudnn(128)
    assert SHARES["v3"].products == SHARES["v5e"].products


@pytest.mark.parametrize(
    ("head_dim", "forward", "backward"),
    [(64, 0.4, 0.3), (128, 0.6, 0.5), (96, 0.5, 0.4), (32, 0.2, 0.15), (256, 0.6, 0.5)],
)
def test_heads_between_two_sizes_are_interpolated(head_dim, forward, backward):
    """Smaller heads take as long as the smallest; larger ones have the largest's share."""
    shares = Shares("measured", "here", 0.5, 0.5, cudnn_forward={64: 0.4, 128: 0.6}, cudnn_backward={64: 0.3, 128: 0.5})
    assert shares.cudnn(head_dim) == pytest.approx((forward, backward))


def test_the_page_has_the_bytes_of_the_head_s_gradient_beside_its_products():
    """For 1,024 tokens: 8 bytes of each number in float32, read and written, and three products."""
    shares = []
    for name in ("v5p", "v4", "v5e", "H100", "v6e"):
        chip = CHIPS[name]
        products = 3 * 2 * 1024 / chip.flops("bfloat16")
        shares.append(f"{8 / chip.hbm_bandwidth / products:.2f}")
    page = Path(__file__).parents[2] / "docs" / "decisions.md"
    assert "| " + " | ".join(["seconds of the bytes over those of the products", *shares]) + " |" in page.read_text()
