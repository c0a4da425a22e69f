"""What all pictures share: colours that differ in lightness too, the look of a legend, and axes of numbered places."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

INK, CALM = "#1f2328", "#6e7781"  # text, and what steps back
KERNEL, PLAIN, BOUND = "#0b5394", "#e0a030", "#1f2328"  # dark, light and black: apart in lightness too
LEGEND = dict(fontsize=8, frameon=False, columnspacing=1.0, borderpad=0.1)


def columns(ax: Axes, n: int, *, numbered: bool, most: int = 8) -> None:
    """Clear the axes for values over the places 0 to n - 1; `numbered`: at most so many of them have their number."""
    ax.clear()
    ax.grid(axis="y", color="#e3e5e8", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.set_xlim(-0.5, max(n - 0.5, 0.5))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))
    ax.tick_params(labelsize=8, labelbottom=numbered)
