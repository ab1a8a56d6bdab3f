"""What a context loses in an overflow, on the demo model: next to nothing where the query is shifted, and all
where it is not. `kvcommons bench truncation` measures it on more."""

from __future__ import annotations

import pytest

from benchmarks.truncation import quality
from demo import MODEL_DIR


@pytest.mark.slow
def test_kv_that_is_left_is_as_good_as_computed_anew() -> None:
    found = quality(MODEL_DIR, texts=1, questions=3, seed=1, progress=lambda _: None)
    assert [row["how"] for row in found.rows] == ["AS", "TT", "NKVT"]
    for kind in ("conversations", "long_texts"):
        assert found.ratios[f"perplexity_{kind}"] == pytest.approx(1.0, abs=0.02)
        assert found.ratios[f"perplexity_{kind}_nkvt"] > 1.1
    assert found.ratios["recall_points"] == pytest.approx(0.0, abs=34.0)
    assert found.ratios["recall_points_nkvt"] < -50
