"""What a context loses in an overflow, on the demo model: next to nothing where the query is shifted, and all
where it is not. `kvcommons bench truncation` measures it on more."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from benchmarks.truncation import quality
from benchmarks.truncation_text import quality_of_text
from demo import MODEL_DIR
from demo.conversations import long_text
from kvcommons.errors import InvalidInput


@pytest.mark.slow
def test_kv_that_is_left_is_as_good_as_computed_anew() -> None:
    found = quality(MODEL_DIR, texts=1, questions=3, seed=1, progress=lambda _: None)
    assert [row["how"] for row in found.rows] == ["AS", "TT", "NKVT"]
    for kind in ("conversations", "long_texts"):
        assert found.ratios[f"perplexity_{kind}"] == pytest.approx(1.0, abs=0.02)
        assert found.ratios[f"perplexity_{kind}_nkvt"] > 1.1
    assert found.ratios["recall_points"] == pytest.approx(0.0, abs=34.0)
    assert found.ratios["recall_points_nkvt"] < -50


@pytest.mark.slow
def test_a_text_is_read_as_well_with_what_is_left_of_it(tmp_path: Path) -> None:
    """What the demo model was trained to say."""
    draw = random.Random(5)
    reported = [message.content for _ in range(40) for message in long_text(draw, len, 400)]
    text = tmp_path / "text"
    text.write_text("\n\n".join(reported))
    found = quality_of_text(MODEL_DIR, text, tokens=700, window=512, progress=lambda _: None)
    assert hashlib.sha256(text.read_bytes()).hexdigest() in found.title
    assert [row["tokens"] for row in found.rows] == [1020, 1020, 1020]
    assert found.ratios["perplexity_percent_as"] == pytest.approx(0.0, abs=3.0)
    assert found.ratios["points_as"] == pytest.approx(0.0, abs=3.0)
    assert found.ratios["perplexity_percent_nkvt"] > 10.0
    with pytest.raises(InvalidInput, match="the text has"):
        quality_of_text(MODEL_DIR, text, tokens=70_000, window=512, progress=lambda _: None)
    with pytest.raises(InvalidInput, match="a window of 2048 tokens, not of 4096"):
        quality_of_text(MODEL_DIR, text, tokens=700, window=4096, progress=lambda _: None)
