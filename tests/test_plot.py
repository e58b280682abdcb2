"""Line charts: round ticks, points where their numbers say, nothing drawn that is not there."""
import math

import numpy as np
import pytest
from PIL import Image

import plot

RED = (0xd6, 0x60, 0x4d)
PLAIN = dict(xlabel="x", title="y")


def drawn(path, color=RED, near=60):
    """(rows, columns) of the pixels near `color`, legend and all."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return np.nonzero(np.abs(pixels - color).sum(-1) < near)


@pytest.mark.parametrize("low, high, log, wanted", [
    (0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3, 11, False, [-2, 0, 2, 4, 6, 8, 10]),
    (0.61, 0.69, False, [0.62, 0.64, 0.66, 0.68]), (0.02, 500, True, [0.1, 1, 10, 100]),
    (1e-9, 1e9, True, [1e-9, 1e-6, 1e-3, 1, 1e3, 1e6, 1e9])])
def test_ticks_are_round(low, high, log, wanted):
    assert plot.ticks(low, high, log) == pytest.approx(wanted)
    assert plot.ticks(0.9, 4.1, whole=True) == [1, 2, 3, 4]


def test_a_point_lies_where_its_numbers_say(tmp_path):
    """With limits [0, 1] and [0, 2] (5 % around the data), by linear interpolation in the box."""
    dots = dict(color=1, line=False)
    plot.write(tmp_path / "a.png", ([(None, [0, 1, 0.25], [0, 2, 1.5], dots)], PLAIN))
    left, right = plot.LEFT, plot.WIDTH - plot.RIGHT
    top, bottom = plot.TOP, plot.HEIGHT - plot.BOTTOM
    rows, columns = drawn(tmp_path / "a.png")
    for x, y in ((0, 0), (1, 2), (0.25, 1.5)):
        column = left + (x + 0.05) / 1.1 * (right - left)
        row = bottom - (y + 0.1) / 2.2 * (bottom - top)
        near = (np.abs(rows - row) < 4) & (np.abs(columns - column) < 4)
        assert near.sum() >= 4
        assert abs(rows[near].mean() - row) < 1 and abs(columns[near].mean() - column) < 1


def test_log_axes_and_equal_units():
    curve = [(None, [0.1, 10.0], [1.0, 1e4])]
    axes = plot.Axes(curve, dict(log=True), 0)
    (x0, y0), (x1, y1), (x, y) = (axes.at(*p) for p in ((0.1, 1.0), (10.0, 1e4), (1.0, 100.0)))
    assert x == pytest.approx((x0 + x1) / 2) and y == pytest.approx((y0 + y1) / 2)
    axes = plot.Axes(curve, dict(equal=True), 0)
    (x0, y0), (x1, y1) = axes.at(0, 0), axes.at(3, 3)
    assert x1 - x0 == pytest.approx(y0 - y1)


def test_what_has_no_place_is_left_out(tmp_path):
    """NaN and infinity everywhere, zero on log axes; what is beyond ylim is drawn at the border."""
    bad = [1.0, math.nan, math.inf, 0.0, 2.0]
    axes = plot.Axes([(None, range(1, 6), bad)], dict(log=True), 0)
    assert [i for i, _ in plot.visible(axes, range(1, 6), bad)] == [0, 4]
    axes = plot.Axes([(None, [0, 1], [0, 9])], dict(ylim=(0, 3)), 0)
    assert plot.visible(axes, [0, 1], [0, 9])[1][1] == axes.at(1, 3)
    plot.write(tmp_path / "empty.png", ([("nothing", [], [])], PLAIN))
    assert Image.open(tmp_path / "empty.png").size == (plot.WIDTH, plot.HEIGHT)


def test_legend_avoids_the_curve(tmp_path):
    """A falling line passes the upper left corner and the lower right: the name goes elsewhere."""
    plot.write(tmp_path / "a.png", ([("name", [0, 1], [1, 0], dict(color=1))], PLAIN))
    rows, columns = drawn(tmp_path / "a.png")
    sample = (rows < plot.TOP + 30) & (columns > plot.WIDTH / 2)       # the upper right corner
    assert sample.sum() > 20


def test_band_and_dashes(tmp_path):
    """A band colours what lies between its edges lightly; dashes leave gaps in a line."""
    flat = [0.0, 1.0], [1.0, 1.0]
    counts = {}
    for name, style in (("solid", {}), ("dashed", dict(dashes=True)), ("band", dict(band=[1, 1]))):
        curve = (None, *flat, dict(color=1, **style))
        plot.write(tmp_path / f"{name}.png", ([curve], dict(ylim=(0, 2))))
        light = [round(255 + 0x26 / 255 * (c - 255)) for c in RED]
        counts[name] = len(drawn(tmp_path / f"{name}.png")[0])
        counts[name, "light"] = len(drawn(tmp_path / f"{name}.png", light, near=10)[0])
    assert 0.25 < counts["dashed"] / counts["solid"] < 0.65
    assert counts["band", "light"] > 50 * counts["solid", "light"] + 10_000
