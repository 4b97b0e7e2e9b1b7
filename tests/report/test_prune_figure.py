"""The picture of a pruning."""

from xml.etree import ElementTree

import pytest

from meristem.report.prune_figure import Smaller, prune_svg


@pytest.mark.parametrize("classifier", [False, True])
def test_it_shows_the_new_run_what_it_lost_and_what_it_saves(classifier: bool) -> None:
    cache, speed = (0.0, None) if classifier else (0.75, 120.0)
    points = [Smaller(8, 0.0, 0.0 if classifier else 1.0, 1.0, speed), Smaller(7, 0.002, cache, 0.9, None)]
    points.append(Smaller(6, 0.015, cache, 0.75, speed))
    picture = prune_svg(points, 2, "mine", tolerance=0.01, repaired=0.004)
    texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    for said in ("mine, pruned", "pruned +0.0150", "repaired +0.0040", "tolerance 0.01", "attention 75%", "6 heads"):
        assert any(said in text for text in texts), said
    assert any("KV cache" in text for text in texts) is not classifier
    assert any("tokens per second" in text for text in texts) is not classifier


def test_a_run_of_which_nothing_left_has_a_picture() -> None:
    assert "8 heads became 8" in prune_svg([Smaller(8, 0.0, 1.0, 1.0, 3.0)], 0, "mine")
