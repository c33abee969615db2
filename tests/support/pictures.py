"""Checks of saved figures."""

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure


def look_at_legends(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Make `savefig` fail if a legend overlaps a panel. Return the figures with legends."""
    save = Figure.savefig
    observed = []

    def saved(figure, *arguments, **options):
        save(figure, *arguments, **options)
        for legend in (axis.get_legend() for axis in figure.axes):
            if legend is not None:
                box = legend.get_window_extent()
                over = [
                    mpl.transforms.Bbox.intersection(box, axis.get_window_extent())
                    for axis in figure.axes
                ]
                # frames touch by a pixel or two
                assert all(pair is None or min(pair.width, pair.height) < 2 for pair in over), (
                    legend
                )
                observed.append(figure)

    monkeypatch.setattr(Figure, "savefig", saved)
    return observed
